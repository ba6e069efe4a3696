"""The page on compression says what the code does."""

import re
from pathlib import Path

import ddlsim.compression

PAGE = (Path(__file__).parents[2] / "docs" / "models" / "compression.md").read_text(encoding="utf-8")


def test_the_example_prints_what_it_says(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "compression.md", "exec"), {})
    promised = re.findall(r"^print\(.*\)\s+# (.*)$", code, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == promised
    assert len(promised) == 3


def test_every_compressor_is_in_the_table():
    known = [
        name
        for name in ddlsim.compression.__all__
        if hasattr(getattr(ddlsim.compression, name), "expected_nbytes")
    ]
    for name in known:
        assert f"`{name}(" in PAGE or name == "Compressor"
    assert len(known) > 15
