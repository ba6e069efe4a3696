"""The page on compression says what the code does."""

import re
from pathlib import Path

import pytest
from documentation import public_names

import ddlsim.compression
from ddlsim.compression import (
    BF16,
    DGC,
    FP16,
    QSGD,
    CountSketch,
    ErrorFeedback,
    GTopK,
    MSTopK,
    Natural,
    NoCompression,
    OneBit,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
)

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
        for name in public_names("ddlsim.compression")
        if hasattr(getattr(ddlsim.compression, name), "expected_nbytes")
    ]
    for name in known:
        assert f"`{name}(" in PAGE or name == "Compressor"
    assert len(known) > 15


#: as the page's table has it: passes to encode, passes to decode a payload, kernels to encode
COSTS = [
    (FP16(), 1, 0, 1),
    (BF16(), 1, 0, 1),
    (SignSGD(), 1, 0, 1),
    (RandomK(0.1), 1, 0, 1),
    (Natural(), 1, 2, 1),
    (Threshold(0.1), 1, 0, 3),
    (QSGD(4), 2, 2, 2),
    (OneBit(), 2, 2, 2),
    (TernGrad(), 2, 2, 2),
    (TernGrad(clip_sigmas=2.5), 3, 2, 3),
    (TopK(0.1), 5, 0, 11),
    (GTopK(0.1), 5, 0, 11),
    (MSTopK(0.1, n_searches=30), 30 + 2, 0, 30 + 4),
    (DGC(1), 10, 0, 11),
    (CountSketch(0.1, rows=5, columns=7), 2 * 5 + 5, 0, 5 + 12),
    (PowerSGD(2), 2, 0, 3),
    (ErrorFeedback(TopK(0.1)), 5 + 5, 0, 11 + 3),
    (ErrorFeedback(OneBit()), 2 + 5, 2, 2 + 3),
]


@pytest.mark.parametrize(("compressor", "encode", "decode", "kernels"), COSTS, ids=lambda value: repr(value)[:30])
def test_passes_and_kernels_are_those_of_the_table(compressor, encode, decode, kernels):
    traits = compressor.traits
    assert (traits.encode_passes, traits.decode_passes, traits.encode_kernels) == (encode, decode, kernels)
    name = type(compressor).__name__
    (row,) = (line for line in PAGE.splitlines() if line.startswith("|") and f"`{name}`" in line.split("|")[1])
    first, last = row.split("|")[2].strip(), row.split("|")[4].strip()
    if re.match(r"\d+\b(?! rows| more)", first):
        assert int(re.match(r"\d+", first)[0]) in (encode, encode - 1)  # TernGrad has one more with clipping
    if re.match(r"\d+\b(?! more)", last):
        assert int(re.match(r"\d+", last)[0]) in (kernels, kernels - 1)


def test_what_lies_there_already_costs_nothing():
    assert NoCompression().traits.encode_passes == 0
