"""The journal's parser reads what keepers write, and ignores a line that was cut off."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.engines.common.program_outcome import StartContext, outcome_of
from gpuyard.engines.local.keeper import _line
from gpuyard.engines.local.keeper_connection import JournalEntry, begun_attempts, parse_journal
from gpuyard.model.job import OutcomeKind

CONTEXT = StartContext(directory="/data", program="train", stdin="/data/in")
entries = st.builds(
    JournalEntry, st.builds("{}.{}".format, st.integers(1, 10**9), st.integers(1, 99)), st.integers(1, 2**22),
    st.one_of(st.integers(0, 255).map(str), st.sampled_from(["began", "unbegun", "no-program"])),
    st.none() | st.integers(1, 2**22), st.none() | st.integers(0, 10**9).map(lambda number: number / 1000),
)  # fmt: skip


def written(entry: JournalEntry) -> bytes:
    pid = "" if entry.pid is None else f" {entry.pid}"
    at = "" if entry.at is None else f" {entry.at:.3f}"
    return f"\n{entry.key} {entry.keeper} {entry.word}{pid}{at} .\n".encode()


@given(st.lists(entries))
def test_every_line_is_parsed(expected: list[JournalEntry]) -> None:
    text = b"".join(map(written, expected))
    assert parse_journal(text) == (expected, len(text))


@given(st.lists(entries, min_size=1), st.data())
def test_a_text_read_in_two_parts_gives_the_same_entries(expected: list[JournalEntry], data: st.DataObject) -> None:
    text = b"".join(map(written, expected))
    cut = data.draw(st.integers(0, len(text)))
    first, read = parse_journal(text[:cut])
    second, _ = parse_journal(text[read:])
    assert first + second == expected


@given(entries, entries, st.data())
def test_only_whole_lines_are_parsed(half: JournalEntry, whole: JournalEntry, data: st.DataObject) -> None:
    line = written(half)
    cut = data.draw(st.integers(0, len(line) - 2))
    assert parse_journal(line[:cut] + written(whole))[0] == [whole]


def test_a_line_of_the_keeper_is_parsed() -> None:
    text = _line("17.1", 42, "began") + _line("17.1", 42, "0 4301")
    assert parse_journal(text)[0] == [JournalEntry("17.1", 42, "began"), JournalEntry("17.1", 42, "0", 4301)]


def test_begun_attempts_are_those_of_the_journal_and_of_logs(tmp_path: Path) -> None:
    """What was not begun has a line that says so after its first, and its empty log is removed."""
    journal = tmp_path / "journal"
    words = [
        ("0.0", "hello"),
        ("17.1", "began"), ("17.1", "1 4301"), ("17.2", "began"),
        ("18.1", "began"), ("18.1", "unbegun-log-enospc"),
        ("19.1", "began"), ("19.1", "unbegun-log-enospc"), ("19.1", "began"),
        ("20.1", "began"), ("20.1", "1 4302"), ("20.2", "began"), ("20.2", "unbegun-output-enospc"),
        ("21.1", "no-program"),
    ]  # fmt: skip
    journal.write_bytes(b"".join(_line(key, 42, word) for key, word in words) + b"\n22.1 42 beg")
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("17.1.log", "23.2.err.log", "notes.txt"):
        (logs / name).touch()
    assert begun_attempts(journal, [logs, tmp_path / "absent"]) == {17: 2, 19: 1, 20: 1, 21: 1, 23: 2}
    assert begun_attempts(tmp_path / "absent", [logs]) == {17: 1, 23: 2}


@pytest.mark.parametrize(
    "line", ["17.1 42 0", "17.1 42 0 .x", "17.1 42 .", "17 42 0 .", "17.1 42 0 1 2 .", " 17.1 42 0 .", "17.1 42 0  ."]
)
def test_a_line_that_no_keeper_writes_is_ignored(line: str) -> None:
    assert parse_journal(f"\n{line}\n".encode())[0] == []


def test_a_status_of_zero_is_success() -> None:
    assert outcome_of("0", CONTEXT).kind is OutcomeKind.SUCCEEDED


@pytest.mark.parametrize(
    ("word", "status", "reason"),
    [
        ("3", 3, "exit status 3"), ("137", 137, "signal 9 (SIGKILL)"), ("143", 143, "signal 15 (SIGTERM)"),
        ("128", 128, "exit status 128"), ("255", 255, "exit status 255"),
    ],
)  # fmt: skip
def test_other_statuses_are_failures_with_a_reason(word: str, status: int, reason: str) -> None:
    outcome = outcome_of(word, CONTEXT)
    assert (outcome.kind, outcome.status, outcome.reason) == (OutcomeKind.FAILED, status, reason)


@pytest.mark.parametrize(
    ("word", "status", "named"),
    [
        ("no-directory", 126, "/data"), ("no-program", 127, "train"), ("not-executable", 126, "train"),
        ("too-long", 126, "longer"), ("no-log", 126, "log"), ("no-stdin", 126, "/data/in"),
        ("stdin-is-pipe", 126, "/data/in"),
    ],
)  # fmt: skip
def test_a_failed_start_names_its_cause(word: str, status: int, named: str) -> None:
    outcome = outcome_of(word, CONTEXT)
    assert (outcome.kind, outcome.status) == (OutcomeKind.CANNOT_START, status)
    assert named in str(outcome.reason)
    assert "None" not in str(outcome_of(word, StartContext()).reason)


@pytest.mark.parametrize("word", [None, "unbegun"])
def test_an_attempt_without_a_start_never_started(word: str | None) -> None:
    assert outcome_of(word, CONTEXT).kind is OutcomeKind.NEVER_STARTED


@pytest.mark.parametrize("word", ["began", "unknown-word"])
def test_an_attempt_that_started_without_a_known_status_is_lost(word: str) -> None:
    assert outcome_of(word, CONTEXT).kind is OutcomeKind.LOST
