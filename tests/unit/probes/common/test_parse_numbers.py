import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.probes import parse_numbers

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["value", "unit", "x"]), inner),
    max_leaves=5,
)


@pytest.mark.parametrize(
    "raw",
    [None, "", " ", "N/A", "[N/A]", "[Not Supported]", "[Unknown Error]", "ERR!", "N/A (Secondary die)", "nan", "inf",
     "-", {"value": "N/A", "unit": "W"}, {}, [], True, "1,024", "12 34", "0x10", "65535", 4294967295, "1e999"],
)  # fmt: skip
def test_a_value_without_a_number_is_unknown(raw: Any) -> None:
    assert parse_numbers.number(raw) is None


@pytest.mark.parametrize(
    ("raw", "value"),
    [("38 %", 38), ("0%", 0), (".97%", 0.97), ("046", 46), ("-5 C", -5), (91, 91), (2.5, 2.5), ("55 °C", 55),
     ({"value": 91, "unit": "%"}, 91), ({"value": "91", "unit": "%"}, 91), ("1e2", 100)],
)  # fmt: skip
def test_figures_are_read_with_and_without_units(raw: Any, value: float) -> None:
    assert parse_numbers.number(raw) == value


@pytest.mark.parametrize(
    ("raw", "unit", "value"),
    [("8192 MiB", "B", 8192), ("12868124672", "B", 12272), ("294.04mb", "B", 294.04), (30576, "MB", 30576),
     ({"value": 2097152, "unit": "B"}, "MB", 2), ("1 GB", "B", 1024), ("2 GiB", "B", 2048),
     ("2048 KiB", "B", 2)],
)  # fmt: skip
def test_memory_in_any_unit_is_converted_to_mb(raw: Any, unit: str, value: float) -> None:
    assert parse_numbers.megabytes(raw, unit) == pytest.approx(value)


@pytest.mark.parametrize("raw", ["8 apples", "-1 MiB", "[N/A]"])
def test_memory_with_an_unknown_unit_is_unknown(raw: str) -> None:
    assert parse_numbers.megabytes(raw) is None


def test_power_is_converted_to_watts() -> None:
    assert parse_numbers.watts("7516 mW") == 7.516
    assert parse_numbers.watts("39.32 W") == 39.32
    assert parse_numbers.watts("26.3147", "mW") == 0.0263
    assert parse_numbers.watts("65535") is None


def test_a_percentage_above_a_hundred_becomes_a_hundred() -> None:
    assert parse_numbers.percent("100.4") == 100
    assert parse_numbers.percent("-1") is None
    assert parse_numbers.percent("123456") is None


@pytest.mark.parametrize(
    "raw", ["[N/A]", "N/A", "", "  ", "[Unknown Error]", "[Not Found]", "[Insufficient Permissions]", None, 5]
)
def test_a_placeholder_is_not_a_name(raw: Any) -> None:
    assert parse_numbers.words(raw) is None


@given(anything)
def test_no_value_raises_or_gives_nan(raw: Any) -> None:
    for read in (
        parse_numbers.number,
        parse_numbers.megabytes,
        parse_numbers.watts,
        parse_numbers.percent,
        parse_numbers.celsius,
    ):
        value = read(raw)
        assert value is None or math.isfinite(value)
    whole = parse_numbers.whole(raw)
    assert whole is None or whole >= 0
    parse_numbers.words(raw)
