"""TOML and JSON that harm whoever reads on: each is one error that says where."""

import pytest

import ddlsim
from ddlsim.errors import ConfigError, shown
from ddlsim.measure import read_measurements
from ddlsim.plain import decoded, parse_json, parse_toml, read_bytes
from ddlsim.validation import read_runs

HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"a = {HUGE}", "f: contains an integer with thousands of digits; use an integer of at most 64 bits"),
        ("a = [1, { b = 9223372036854775808 }]", "f: a.1.b: an integer of more than 64 bits"),
        (".".join(["a"] * 5000) + " = 1", "f: nested more than 100 levels deep; is it the right file?"),
        ("a = " + "[" * 5000 + "]" * 5000, "f: nested too deeply"),
        ("a = nan", "f: a = nan: is no number"),
        ("a = 1e-320", "f: a = 1e-320: must be 0, or from 1e-100 to 1e+100 in size"),
        ("[t]\nwhen = 1979-05-27", "f: t.when = 1979-05-27: no field takes a date"),
        ("a = ", "f: not valid TOML: Invalid value (at end of document)"),
    ],
    ids=["digits", "bits", "dotted", "nested", "nan", "tiny", "date", "cut"],
)
def test_toml_that_harms(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_toml(text, "f")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f'{{"a": {HUGE}}}', "contains an integer with thousands of digits"),
        (f'{{"a": {10**400}}}', "a: an integer of more than 64 bits"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": [NaN]}', "a.0 = nan: is no number"),
        ('{"a": ["x\\ud800"]}', "'a.0': .* contains half of a surrogate pair"),
        ('{"\\udfff": 1}', "contains half of a surrogate pair"),
    ],
    ids=["digits", "bits", "nested", "nan", "half", "half a key"],
)
def test_json_that_harms(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_json(text)


def test_what_is_allowed_passes():
    assert parse_toml("a = [1, inf, 1e-50, 9223372036854775807]") == {"a": [1, float("inf"), 1e-50, 2**63 - 1]}
    assert parse_json('{"a": [null, -0.0]}') == {"a": [None, 0.0]}


@pytest.mark.parametrize(("data", "place"), [(b"a\nbc\xffd", r"line 2: .*\(byte 4, 0xff\)"),
                                             (b"\xef\xbb\xbfa\n\xc3(", r"line 2: .*\(byte 5, 0xc3\)")])  # fmt: skip
def test_a_broken_byte_has_line_and_place(data, place):
    with pytest.raises(ConfigError, match=f"^f: {place}"):
        decoded(data, "f")


def test_a_file_that_does_not_end_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("ddlsim.plain.MAX_NBYTES", 10)
    (tmp_path / "f").write_bytes(b"x" * 11)
    with pytest.raises(ConfigError, match=r"is larger than"):
        read_bytes(tmp_path / "f")


@pytest.mark.parametrize("value", [10**5000, "x" * 10**7, [[1] * 1000] * 1000, {"a\nb": "c\nd" * 100}, b"\0" * 1000],
                         ids=["number", "text", "list", "table", "bytes"])  # fmt: skip
def test_values_are_shown_in_one_short_line(value):
    text = shown(value)
    assert len(text) <= 200
    assert "\n" not in text


def test_messages_are_one_readable_line():
    text = str(ConfigError("f:\nx = " + "9" * 10_000 + " must be " + "a b " * 10_000 + " the end"))
    assert len(text) < 1300
    assert text.startswith("f: x = 999")
    assert text.endswith("the end")


@pytest.mark.parametrize("separator", [";", "\t"], ids=["semicolons", "tabs"])
@pytest.mark.parametrize(
    ("head", "read"),
    [
        ("experiment,operation,n_ranks,n_hosts,nbytes,median_s", read_measurements),
        ("workers,batch_size,step_time (ms)", read_runs),
        ("name,shape", ddlsim.load_model),
        ("time_s,host", lambda path: ddlsim.Failures(trace=path).recorded),
        ("time_s,rate", lambda path: ddlsim.Background("h0", "h1", trace=path)),
    ],
    ids=["measurements", "runs", "tensors", "failures", "traffic"],
)
def test_columns_are_separated_by_commas(head, separator, read, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(f"{head}\n{head}\n".replace(",", separator))
    name = {";": "semicolons", "\t": "tabs"}[separator]
    with pytest.raises(ConfigError, match=rf"t.csv.*columns are separated by {name}; separate them by commas"):
        read(path)
