"""Addresses of the kernel's entry points, which other compiled code calls (:mod:`ddlsim.network.pointers`)."""

from __future__ import annotations

import functools
from typing import Any

from ddlsim import compiler
from ddlsim.network import extensions, kernel
from ddlsim.network.state import CHANGES_CODE, QUEUES_CODE, ROUNDS_CODE, SHAPING_CODE, Ints

#: extension of the kernel -> place of its address in ``Net.counts``
EXTENSIONS = {
    "work_queues": QUEUES_CODE,
    "shape": SHAPING_CODE,
    "change": CHANGES_CODE,
    "replay_rounds": ROUNDS_CODE,
}


def addresses() -> tuple[int, int]:
    """Return the addresses of `kernel.advance` and `kernel.join`; compile or load them first if necessary."""
    return _address("advance"), _address("join")


def send_address() -> int:
    """Return the address of `kernel.send_one`; compile or load it first if necessary."""
    return _address("send_one")


def enable(counts: Ints, extension: str) -> None:
    """Enable one of the kernel's `EXTENSIONS`; compile or load it first if necessary."""
    counts[EXTENSIONS[extension]] = _address(extension)


def prepare_extensions() -> None:
    """Compile or load all `EXTENSIONS`."""
    for extension in EXTENSIONS:
        _address(extension)


@functools.cache
def _address(name: str) -> int:
    function: Any = getattr(extensions if name in EXTENSIONS else kernel, name)
    if compiler.LOADS:
        function.load()
        if function.address is not None:
            return int(function.address)
    from ddlsim.network.pointers import ARGUMENTS

    arguments = ARGUMENTS[name]
    if compiler.LOADS:
        if function.compile(arguments):
            return int(function.address)
        function = function.dispatcher
    function.compile(arguments)
    compiled = function.overloads[arguments]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name))
