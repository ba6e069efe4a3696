"""Functions built from numba's extension points, for compiled code; numba is imported only to compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddlsim.compiler import deferred

if TYPE_CHECKING:
    from numba.cpython.unsafe.numbers import trailing_zeros as trailing_zeros

    from ddlsim.network.pointers import call_advance as call_advance
    from ddlsim.network.pointers import call_join as call_join
    from ddlsim.network.pointers import call_send as call_send
    from ddlsim.network.view import attach as attach
    from ddlsim.network.view import attach_at as attach_at
    from ddlsim.network.view import call_extension as call_extension
    from ddlsim.network.view import column as column
    from ddlsim.network.view import view_at as view_at
else:
    attach = deferred("ddlsim.network.view", "attach")
    attach_at = deferred("ddlsim.network.view", "attach_at")
    call_extension = deferred("ddlsim.network.view", "call_extension")
    call_advance = deferred("ddlsim.network.pointers", "call_advance")
    call_join = deferred("ddlsim.network.pointers", "call_join")
    call_send = deferred("ddlsim.network.pointers", "call_send")
    view_at = deferred("ddlsim.network.view", "view_at")
    column = deferred("ddlsim.network.view", "column")
    trailing_zeros = deferred("numba.cpython.unsafe.numbers", "trailing_zeros")
