"""Extensions of the event kernel that not all networks need: queues, shaped links and transports, changes, replays of
rounds. Compiled.

Compiling them costs as much as the rest of the kernel. Each extension is therefore compiled separately, when a network
first needs it (:func:`enable`). The kernel calls it at its address (in ``Net.counts``); other compiled code calls the
kernel's entry points at theirs (:mod:`ddlsim.network.view`).
"""

from __future__ import annotations

import functools
from typing import Any

from ddlsim import compiler
from ddlsim.compiler import addressed
from ddlsim.network import kernel
from ddlsim.network.changes import apply_next
from ddlsim.network.intrinsics import attach_at, view_at
from ddlsim.network.queues import enter, serve, settle
from ddlsim.network.rounds import observe, replay, watch
from ddlsim.network.state import ENTER, REPLAY, SERVE, START, WATCH, Counts
from ddlsim.network.transport import follows, has_to_wait, next_in_line, start_shaped

#: extensions of the kernel; ``Net.counts`` contains their addresses
EXTENSIONS = ("work_queues", "shape", "change", "replay_rounds")


@addressed
def work_queues(table: int, what: int, slot: int, limit: float) -> Any:
    """Depending on `what`, advance the queues to `limit`, settle this instant, or enter the message in `slot`."""
    net = view_at(table)
    if what == SERVE:
        serve(net, limit)
    elif what == ENTER:
        enter(net, slot)
    else:
        settle(net)
    return 0


@addressed
def shape(table: int, what: int, slot: int, limit: float) -> Any:
    """Start the message in `slot`, or the next one on its connection; return 1 if it has arrived, else 0."""
    net = attach_at(table)
    if what == START:
        if net.transported == 1 and has_to_wait(net, slot):
            return 0
        if start_shaped(net, slot, net.transported == 1 and follows(net, slot)):
            return 0
    if net.transported == 1:
        next_in_line(net, slot)
    return 1


@addressed
def change(table: int, what: int, slot: int, limit: float) -> Any:
    """Apply the next change."""
    apply_next(attach_at(table))
    return 0


@addressed
def replay_rounds(table: int, what: int, slot: int, limit: float) -> Any:
    """Depending on `what`, repeat the last round up to `limit`, start watching a round, or observe an instant."""
    net = attach_at(table)
    if what == REPLAY:
        replay(net, limit)
    elif what == WATCH:
        watch(net)
    else:
        observe(net)
    return 0


# ---------------------------------------------------------------- addresses of entry points


def enable(counts: Counts, extension: str) -> None:
    """Enable one of the kernel's `EXTENSIONS`; compile or load it first if necessary."""
    setattr(counts, f"{extension}_code", address(extension))


def prepare_extensions() -> None:
    """Compile or load all `EXTENSIONS`."""
    for extension in EXTENSIONS:
        address(extension)


@functools.cache
def address(name: str) -> int:
    """Return the address of an entry point of the kernel or of an extension; compile or load it first if necessary."""
    function: Any = globals()[name] if name in EXTENSIONS else getattr(kernel, name)
    if compiler.LOADS:
        function.load()
        if function.address is not None:
            return int(function.address)
    from ddlsim.network.view import ARGUMENTS

    arguments = ARGUMENTS[name]
    if compiler.LOADS:
        if function.compile(arguments):
            return int(function.address)
        function = function.dispatcher
    function.compile(arguments)
    compiled = function.overloads[arguments]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name))
