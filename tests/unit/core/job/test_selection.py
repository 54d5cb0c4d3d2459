import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.job.selection import JobSelection, format_ids, parse_selection
from gpuyard.errors import UserError


def test_all_kinds_of_selection_can_be_combined() -> None:
    chosen = parse_selection("17, 20-22 name=big,tag=night 3 name=small")
    assert chosen == JobSelection(ranges=((17, 17), (20, 22), (3, 3)), names=("big", "small"), tags=("night",))
    assert parse_selection("all").is_all
    assert parse_selection("5-5").ranges == ((5, 5),)


@pytest.mark.parametrize("text", ["", "  ", ",", " , "])
def test_an_empty_text_selects_nothing(text: str) -> None:
    assert parse_selection(text).is_empty


@pytest.mark.parametrize("text", ["all", "1", "name=a", "tag=b"])
def test_a_text_that_selects_something_is_not_empty(text: str) -> None:
    assert not parse_selection(text).is_empty


@pytest.mark.parametrize(
    "word", ["big", "-3", "3-", "1.5", "0x10", "name=", "tag=", "nam=x", "ALL", "1-2-3", "٣", "1" * 19]
)
def test_an_invalid_selection_is_quoted_with_valid_examples(word: str) -> None:
    with pytest.raises(UserError, match=f"'{word}' names no job") as caught:
        parse_selection(f"17 {word}")
    assert caught.value.hint == "write an id as 17, a range as 17-20, or name=big, tag=night, all"


def test_the_hint_for_a_reversed_range_has_it_the_right_way_round() -> None:
    with pytest.raises(UserError, match="'20-17' is an empty range") as caught:
        parse_selection("20-17")
    assert caught.value.hint == "did you mean 17-20?"


def test_a_value_may_hold_an_equals_sign() -> None:
    assert parse_selection("name=a=b").names == ("a=b",)


def test_ids_are_written_with_neighbours_as_a_range() -> None:
    assert format_ids([19, 3, 17, 18, 20]) == "3 17-20"
    assert format_ids([]) == ""


@given(st.sets(st.integers(0, 60)))
def test_formatted_ids_parse_as_the_same_ids(ids: set[int]) -> None:
    read = parse_selection(format_ids(ids)).ranges
    assert {each for first, last in read for each in range(first, last + 1)} == ids
    assert list(read) == sorted(read)
