"""Unit strings and the shape of error messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlsim.errors import ConfigError, DdlsimError, UnitError, unknown_name
from ddlsim.units import DIMENSIONS, parse, quantity_text


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("25 Gbit/s", "bandwidth", 3.125e9),
        ("1 Gb/s", "bandwidth", 1.25e8),
        ("100 Mbps", "bandwidth", 1.25e7),
        ("12 GB/s", "bandwidth", 12e9),
        ("1.5e6 GB/s", "bandwidth", 1.5e15),
        ("-2E-3 ms", "time", -2e-6),
        ("1 GiB/s", "bandwidth", 2.0**30),
        ("10 us", "time", 1e-5),
        ("10us", "time", 1e-5),
        (" 0.5 ms ", "time", 5e-4),
        ("2 min", "time", 120.0),
        ("1 h", "time", 3600.0),
        ("5 days", "time", 5 * 86400.0),
        ("2 weeks", "time", 14 * 86400.0),
        ("1 y", "time", 365 * 86400.0),
        ("1.5e3 years", "time", 1500 * 365 * 86400.0),
        ("0 s", "time", 0.0),
        ("100 MB", "bytes", 1e8),
        ("25 MiB", "bytes", 25 * 2.0**20),
        ("1 KiB", "bytes", 1024.0),
        ("8 bit", "bytes", 1.0),
        ("15.7 TFLOP/s", "flops", 15.7e12),
        ("300 images/s", "rate", 300.0),
        ("300 W", "power", 300.0),
        ("5 /s", "rate", 5.0),
        ("2.5e3 1/s", "rate", 2500.0),
        ("300 mW", "power", 0.3),
        ("9 p/s", "rate", 9e-12),
    ],
)
def test_parse(text, dimension, value):
    assert parse(text, dimension) == pytest.approx(value, rel=1e-15)


def test_ten_microseconds_are_exact():
    assert parse("10 us", "time") == 1e-05


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_example_in_the_error_message_is_valid(dimension):
    assert parse(DIMENSIONS[dimension][2], dimension) > 0


@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize("number", [300.0, 0.1, 1 / 3, 1e-9, 0.0, 1e30])
def test_a_number_survives_the_way_through_text(number, dimension):
    assert parse(quantity_text(number, dimension), dimension) == number


@given(st.floats(1e-3, 1e3))
def test_a_bit_is_an_eighth_of_a_byte(number):
    assert parse(f"{number} Gbit/s", "bandwidth") == pytest.approx(parse(f"{number} GB/s", "bandwidth") / 8)


@pytest.mark.parametrize(
    ("text", "dimension", "words"),
    [
        ("10", "time", ["'10'", "no unit", "10 us"]),
        ("10 Gbit/s", "time", ["is a bandwidth, not a time", "10 us"]),
        ("10 us", "bandwidth", ["is a time, not a bandwidth", "25 Gbit/s"]),
        ("10 GB", "bandwidth", ["is a size, not a bandwidth"]),
        ("10 furlong", "time", ["unknown unit", "furlong", "10 us"]),
        ("80.5 parsecs", "time", ["unknown unit 'parsecs'"]),
        ("-1e3 uus", "time", ["unknown unit 'uus'"]),
        ("fast", "bandwidth", ["'fast'", "25 Gbit/s"]),
        ("", "time", ["''", "10 us"]),
        ("inf s", "time", ["'inf s'", "10 us"]),
        ("nan s", "time", ["'nan s'", "10 us"]),
        ("1e999999999 s", "time", ["not finite"]),
        ("1,5 ms", "time", ["'1,5 ms' contains a comma", "a point"]),
        ("1,000 Mbit/s", "bandwidth", ["contains a comma", "without a separator"]),
        ("100 mbit/s", "bandwidth", ["'m' before 'bit/s' is a prefix below 1", "'M' is 1e6", "25 Gbit/s"]),
        ("25 mB", "bytes", ["'m' before 'B' is a prefix below 1", "100 MB"]),
        ("10 uFLOP/s", "flops", ["'u' before 'FLOP/s' is a prefix below 1"]),
        ("10 Gbits/s", "bandwidth", ["unknown unit 'Gbits/s' (did you mean 'Gbit/s'?)"]),
        ("10 gb/s", "bandwidth", ["(did you mean 'Gb/s' or 'GB/s'?)"]),
        ("1 Gb", "bytes", ["(did you mean 'GB' or 'Gbit'?)"]),
        ("3 hrs", "time", ["(did you mean 'h'?)"]),
        ("3 USD/hour", "price", ["(did you mean 'USD/h'?)"]),
        ("1 month", "time", ["unknown unit 'month'; write"]),
    ],
)
def test_what_is_wrong_and_what_to_write(text, dimension, words):
    with pytest.raises(UnitError) as caught:
        parse(text, dimension)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_the_field_comes_first_where_it_is_named():
    with pytest.raises(UnitError, match=r"^Target: deadline: '48' has no unit"):
        parse("48", "time", "Target: deadline")


def test_unknown_name_hints_at_the_nearest_or_lists_ten():
    near = unknown_name("model", "resnet5O", ["resnet50", "vgg16"], "x.toml")
    assert str(near) == "x.toml: unknown model 'resnet5O'; did you mean 'resnet50'?"
    far = unknown_name("model", "zzz", ["vgg16", "resnet50"])
    assert str(far) == "unknown model 'zzz'; known: resnet50, vgg16"
    many = unknown_name("model", "zzz", [f"m{i:02}" for i in range(83)])
    assert str(many).endswith("known: m00, m01, m02, m03, m04, m05, m06, m07, m08, m09 and 73 more")


def test_one_tree_of_errors():
    """simpy rebuilds a failed event's exception from its args, so one message must be enough."""
    assert issubclass(UnitError, ConfigError)
    assert issubclass(ConfigError, DdlsimError)
    assert issubclass(ConfigError, ValueError)
    error = unknown_name("model", "a", ["b"])
    assert str(type(error)(*error.args)) == str(error)
