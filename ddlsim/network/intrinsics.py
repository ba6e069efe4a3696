"""Functions built from numba's extension points, for compiled code; numba is imported only to compile.

They are named one by one: numba resolves attributes of a deferred module at each use, and compiling the kernel takes 15
% longer.
"""

from __future__ import annotations

from ddlsim.compiler import deferred

attach = deferred("ddlsim.network.view", "attach")
attach_at = deferred("ddlsim.network.view", "attach_at")
call_advance = deferred("ddlsim.network.view", "call_advance")
call_extension = deferred("ddlsim.network.view", "call_extension")
call_join = deferred("ddlsim.network.view", "call_join")
call_send = deferred("ddlsim.network.view", "call_send")
column = deferred("ddlsim.network.view", "column")
view_at = deferred("ddlsim.network.view", "view_at")
