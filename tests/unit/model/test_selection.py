import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.errors import UserError
from gpuyard.model.lifecycle import JobState
from gpuyard.model.selection import JobSelection, describe_conditions, format_ids, parse_selection


def test_kinds_of_selection_can_be_combined() -> None:
    chosen = parse_selection("17, 20-22 name=big,tag=night 3 name=small")
    assert chosen == JobSelection(ranges=((17, 17), (20, 22), (3, 3)), names=("big", "small"), tags=("night",))
    assert parse_selection("all").is_all
    assert parse_selection("5-5").ranges == ((5, 5),), "all kinds of selection can be combined"
    chosen = parse_selection("state=failed,cancelled,tag=a,b 17,20-22 user=ann since=2h30m")
    assert (chosen.states, chosen.tags) == ((JobState.FAILED, JobState.CANCELLED), ("a", "b"))
    assert chosen.ranges == ((17, 17), (20, 22))
    assert (chosen.users, chosen.since) == (("ann",), "2h30m"), "after a comma a value belongs to the key before it"
    assert describe_conditions(chosen) == "state=failed,cancelled tag=a,b user=ann since=2h30m"
    assert parse_selection("name=a=b").names == ("a=b",), "a value may hold an equals sign"


@pytest.mark.parametrize("text", ["", "  ", ",", " , "])
def test_an_empty_text_selects_nothing(text: str) -> None:
    assert parse_selection(text).is_empty


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("state=broken", "'broken' is not a state"), ("state=failed,17", "'17' is not a state"),
        ("since=soon", "'soon' is not a time"), ("since=25:00", "'25:00' is not a time"),
        ("since=2026-13-01", "'2026-13-01' is not a time"), ("since=1h since=2h", "several times"),
    ],
)  # fmt: skip
def test_a_condition_with_a_bad_value_says_what_it_can_be(text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        parse_selection(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "is_named", "is_lasting"),
    [
        ("17 18", True, True), ("17-18", False, True), ("all", False, True), ("tag=a", False, True),
        ("17 state=failed", False, False), ("since=1h", False, False),
    ],
)  # fmt: skip
def test_single_ids_name_each_job_and_states_do_not_last(text: str, is_named: bool, is_lasting: bool) -> None:
    chosen = parse_selection(text)
    assert (chosen.names_each_job, chosen.is_lasting) == (is_named, is_lasting)


@pytest.mark.parametrize("text", ["all", "1", "name=a", "tag=b", "state=failed", "user=a", "since=1d"])
def test_a_text_that_selects_something_is_not_empty(text: str) -> None:
    assert not parse_selection(text).is_empty


@pytest.mark.parametrize(
    "word", ["big", "-3", "3-", "1.5", "0x10", "name=", "tag=", "nam=x", "ALL", "1-2-3", "٣", "1" * 19]
)
def test_an_invalid_selection_is_quoted_with_valid_examples(word: str) -> None:
    with pytest.raises(UserError, match=f"'{word}' names no job") as caught:
        parse_selection(f"17 {word}")
    assert caught.value.hint == (
        "write an id as 17, a range as 17-20, or state=failed, tag=night, name=big, since=22:00, all"
    )


def test_ids_are_written_with_neighbours_as_a_range() -> None:
    assert format_ids([19, 3, 17, 18, 20]) == "3 17-20"
    assert format_ids([]) == ""
    with pytest.raises(UserError, match="'20-17' is an empty range") as caught:
        parse_selection("20-17")
    assert caught.value.hint == "did you mean 17-20?", "the hint for a reversed range has it the right way round"


@given(st.sets(st.integers(0, 60)))
def test_formatted_ids_parse_as_the_same_ids(ids: set[int]) -> None:
    read = parse_selection(format_ids(ids)).ranges
    assert {each for first, last in read for each in range(first, last + 1)} == ids
    assert list(read) == sorted(read)
