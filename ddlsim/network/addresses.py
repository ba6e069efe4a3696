"""The addresses of entry points of the kernel, which other compiled code calls (:mod:`ddlsim.network.pointers`)."""

from __future__ import annotations

import functools
from typing import Any

from ddlsim import compiler
from ddlsim.network import extensions, kernel
from ddlsim.network.state import CHANGES_CODE, QUEUES_CODE, SHAPING_CODE, Ints

#: of each extension of the kernel: the place of its address in ``Net.counts``
EXTENSIONS = {"work_queues": QUEUES_CODE, "shape": SHAPING_CODE, "change": CHANGES_CODE}


def addresses() -> tuple[int, int]:
    """Return the addresses of `kernel.advance` and `kernel.join`, compiled or loaded first if they are not yet."""
    return _address("advance"), _address("join")


def send_address() -> int:
    """Return the address of `kernel.send_one`, compiled or loaded first if it is not yet."""
    return _address("send_one")


def enable(counts: Ints, extension: str) -> None:
    """Let the kernel call one of `EXTENSIONS`, compiled or loaded first if it is not yet."""
    counts[EXTENSIONS[extension]] = _address(extension)


def prepare_extensions() -> None:
    """Compile or load all `EXTENSIONS`."""
    for extension in EXTENSIONS:
        _address(extension)


@functools.cache
def _address(name: str) -> int:
    function: Any = getattr(extensions if name in EXTENSIONS else kernel, name)
    if compiler.PRECOMPILED is not None and function.address is not None:
        return int(function.address)
    from ddlsim.network.pointers import ARGUMENTS

    arguments = ARGUMENTS[name]
    function = function if compiler.PRECOMPILED is None else function.dispatcher
    function.compile(arguments)
    compiled = function.overloads[arguments]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name))
