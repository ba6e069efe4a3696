"""Addresses of the kernel's entry points, which other compiled code calls (:mod:`ddlsim.network.view`)."""

from __future__ import annotations

import functools
from typing import Any

from ddlsim import compiler
from ddlsim.network import extensions, kernel
from ddlsim.network.state import Counts

#: extensions of the kernel; ``Net.counts`` contains their addresses
EXTENSIONS = ("work_queues", "shape", "change", "replay_rounds")


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
    function: Any = getattr(extensions if name in EXTENSIONS else kernel, name)
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
