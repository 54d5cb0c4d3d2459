"""What supervisors wrote is read as they meant it, and a line that was cut off says nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.jobs import OutcomeKind
from gpuyard.engines.journal import Entry, Things, outcome_of, parse

THINGS = Things(directory="/data", program="train", stdin="/data/in")
entries = st.builds(
    Entry,
    st.builds("{}.{}".format, st.integers(1, 10**9), st.integers(1, 99)),
    st.integers(1, 2**22),
    st.one_of(st.integers(0, 255).map(str), st.sampled_from(["unbegun", "no-program"])),
)


def written(entry: Entry) -> bytes:
    return f"\n{entry.key} {entry.pid} {entry.word} .\n".encode()


@given(st.lists(entries))
def test_every_line_comes_back(told: list[Entry]) -> None:
    text = b"".join(map(written, told))
    assert parse(text) == (told, len(text))


@given(st.lists(entries, min_size=1), st.data())
def test_a_text_read_in_two_parts_tells_the_same(told: list[Entry], data: st.DataObject) -> None:
    text = b"".join(map(written, told))
    cut = data.draw(st.integers(0, len(text)))
    first, read = parse(text[:cut])
    second, _ = parse(text[read:])
    assert first + second == told


@given(entries, entries, st.data())
def test_half_a_line_is_nothing_and_harms_no_other(half: Entry, whole: Entry, data: st.DataObject) -> None:
    line = written(half)
    cut = data.draw(st.integers(0, len(line) - 2))
    assert parse(line[:cut] + written(whole))[0] == [whole]


def test_a_status_of_zero_is_success() -> None:
    assert outcome_of("0", THINGS).kind is OutcomeKind.SUCCEEDED


@pytest.mark.parametrize(
    ("word", "status", "reason"),
    [
        ("3", 3, "exit status 3"),
        ("137", 137, "signal 9 (SIGKILL)"),
        ("143", 143, "signal 15 (SIGTERM)"),
        ("128", 128, "exit status 128"),
        ("255", 255, "exit status 255"),
    ],
)
def test_other_statuses_are_failures_in_words(word: str, status: int, reason: str) -> None:
    outcome = outcome_of(word, THINGS)
    assert (outcome.kind, outcome.status, outcome.reason) == (OutcomeKind.FAILED, status, reason)


@pytest.mark.parametrize(
    ("word", "status", "named"),
    [
        ("no-directory", 126, "/data"),
        ("no-program", 127, "train"),
        ("not-executable", 126, "train"),
        ("no-log", 126, "log"),
        ("no-stdin", 126, "/data/in"),
        ("no-process", 126, "process"),
    ],
)
def test_what_kept_it_from_starting_is_named(word: str, status: int, named: str) -> None:
    outcome = outcome_of(word, THINGS)
    assert (outcome.kind, outcome.status) == (OutcomeKind.CANNOT_START, status)
    assert named in str(outcome.reason)
    assert "None" not in str(outcome_of(word, Things()).reason)


def test_one_that_was_never_let_go_is_unbegun() -> None:
    assert outcome_of("unbegun", THINGS).kind is OutcomeKind.UNBEGUN


@pytest.mark.parametrize("word", [None, "riddle"])
def test_no_word_or_an_unknown_one_is_a_loss(word: str | None) -> None:
    assert outcome_of(word, THINGS).kind is OutcomeKind.LOST
