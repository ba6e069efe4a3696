"""What people are told while the kernel is compiled."""

import numba as nb

from ddlsim.compiler import inlined
from ddlsim.network.compiled import announced


def test_compiling_an_announced_function_is_said_once(capsys):
    @inlined
    def doubled(x):
        return 2.0 * x

    def work(x):
        return doubled(x) + 1.0

    compiled = nb.njit(work)  # not cached: compiled in every run of the tests
    announced(compiled)
    assert compiled(1.5) == 4.0
    assert capsys.readouterr().err == "ddlsim: compiling the event kernel, once; this takes 10 to 20 seconds\n"
    assert compiled(2.5) == 6.0
    assert capsys.readouterr().err == ""
