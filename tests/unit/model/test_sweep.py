"""The values of sweeps: ranges as people write them, all combinations, and a part of them chosen by a seed."""

from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuyard.errors import UserError
from gpuyard.model.sweep import all_points, count_points, parse_axes, sample_points

WHOLE = st.integers(-(10**6), 10**6)
ENDS = st.tuples(WHOLE, st.integers(0, 6)).map(lambda pair: str(Decimal(pair[0]).scaleb(-pair[1])))
POSITIVE = st.tuples(st.integers(1, 10**6), st.integers(-9, 9)).map(lambda pair: f"{pair[0]}e{pair[1]}")


def values(text: str) -> list[str]:
    return [point["x"] for point in all_points(parse_axes([f"x={text}"]))]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("1e-4..1e-1:log4", "1e-4 1e-3 1e-2 1e-1"), ("0.0001..0.1:log4", "0.0001 0.001 0.01 0.1"),
        ("1e-4..1e-1:log5", "1e-4 5.623e-4 3.162e-3 1.778e-2 1e-1"),
        ("1..1e6:log7", "1 10 100 1000 1e4 1e5 1e6"), ("1E-5..3e-4:log3", "1E-5 5.477e-5 3e-4"),
        ("1e-1..1e-4:log4", "1e-1 1e-2 1e-3 1e-4"), ("1..1.001:log3", "1 1.0004999 1.001"),
        ("8..128:log5", "8 16 32 64 128"), ("0..4", "0 1 2 3 4"), ("0-4", "0 1 2 3 4"),
        ("-2..2", "-2 -1 0 1 2"), ("2..0", "2 1 0"), ("5..5", "5"), ("0..1:lin5", "0 0.25 0.5 0.75 1"),
        ("0..1:lin4", "0 0.333333 0.666667 1"), ("0.1..0.3:lin3", "0.1 0.2 0.3"),
        ("0..1e-3:lin3", "0 5e-4 1e-3"), ("-1..1:lin3", "-1 0 1"), ("0..100:25", "0 25 50 75 100"),
        ("0..10:3", "0 3 6 9"), ("0..0.5:0.1", "0 0.1 0.2 0.3 0.4 0.5"), ("1..0:0.5", "1 0.5 0"),
        ("1e-3..3e-3:1e-3", "1e-3 2e-3 3e-3"), ("adam,../data,1e-4,0-1,3..4", "adam ../data 1e-4 0 1 3 4"),
    ],
)  # fmt: skip
def test_values_are_written_as_a_person_would(text: str, written: str) -> None:
    assert values(text) == written.split()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0..1:lgo4", "is not a range"), ("0..x", "is not a range"), ("0..0.5", "does not say how many"),
        ("1e1..1e3", "does not say how many"), ("0..1:log4", "above 0"), ("-1..1:log4", "above 0"),
        ("1..2:lin1", "at least 2 values"), ("1..1:lin3", "two different ends"),
        ("0..1:0", "step .* not above 0"), ("0..1:-1", "step .* not above 0"),
        ("0..1e9:1e-9", "too many values"), ("1..2:log100001", "too many values"),
    ],
)  # fmt: skip
def test_a_range_that_has_no_values_is_refused(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        values(text)


@given(ENDS, ENDS, st.integers(2, 60))
@example("0.1", "0.3", 3)
def test_values_at_equal_distances_keep_both_ends_and_their_order(first: str, last: str, count: int) -> None:
    if Decimal(first) == Decimal(last):
        return
    written = values(f"{first}..{last}:lin{count}")
    numbers = list(map(Decimal, written))
    assert (len(set(numbers)), written[0], written[-1]) == (count, first, last)
    assert numbers == sorted(numbers, reverse=numbers[0] > numbers[-1])
    step = (numbers[-1] - numbers[0]) / (count - 1)
    assert all(abs(at * step + numbers[0] - number) <= abs(step) / 1000 for at, number in enumerate(numbers))


@given(POSITIVE, POSITIVE, st.integers(2, 60))
def test_values_at_equal_ratios_keep_both_ends_and_their_order(first: str, last: str, count: int) -> None:
    if Decimal(first) == Decimal(last):
        return
    written = values(f"{first}..{last}:log{count}")
    numbers = list(map(Decimal, written))
    assert (len(set(numbers)), written[0], written[-1]) == (count, first, last)
    assert numbers == sorted(numbers, reverse=numbers[0] > numbers[-1])
    ratio = (numbers[-1] / numbers[0]) ** (Decimal(1) / (count - 1))
    assert all(
        abs(now / before / ratio - 1) < abs(ratio - 1) / 10 + Decimal("1e-3") for before, now in pairwise(numbers)
    )


@given(WHOLE, st.integers(0, 50), st.integers(1, 9))
def test_steps_are_exact(first: int, count: int, step: int) -> None:
    last = first + count * step
    assert values(f"{first}..{last}:{step}") == [str(first + at * step) for at in range(count + 1)]
    with_points = values(f"{first}.1..{last}.1:{step}") if first >= 0 else []
    assert all(each.endswith(".1") for each in with_points)


# Combinations and samples

AXES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(
    lambda counts: parse_axes([f"{chr(97 + place)}=0..{count - 1}" for place, count in enumerate(counts)])
)


def test_samples_are_of_all_combinations() -> None:
    axes = parse_axes(["lr=1,2", "seed=0..1"])
    assert [tuple(point.values()) for point in all_points(axes)] == [("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")]
    axes = parse_axes(["x=0..9", "y=0..9"])
    samples = [tuple(tuple(point.values()) for point in sample_points(axes, 10, seed)) for seed in range(200)]
    assert len(set(samples)) > 190, "another seed chooses others and each combination has a chance"
    assert len({point for sample in samples for point in sample}) == 100
    axes = parse_axes([f"{name}=0..999999999" for name in "abcdef"])
    assert count_points(axes) == 10**54
    sample = list(sample_points(axes, 5, 1))
    assert len(sample) == 5, "a sample of a huge product makes only its own combinations"
    assert sample == sorted(sample, key=lambda point: tuple(map(int, point.values())))
    # Names that share a variable are refused.
    with pytest.raises(UserError, match="'lr' and 'LR' differ only in capitals"):
        parse_axes(["lr=1", "LR=2"])


@given(AXES, st.integers(1, 700), st.integers())
def test_a_sample_is_a_part_of_all_combinations_in_their_order(axes: list, count: int, seed: int) -> None:  # type: ignore[type-arg]
    everything = list(all_points(axes))
    sample = list(sample_points(axes, count, seed))
    assert len(sample) == min(count, len(everything)) == min(count, count_points(axes))
    places = [everything.index(point) for point in sample]
    assert places == sorted(set(places))
    assert list(sample_points(axes, count, seed)) == sample
