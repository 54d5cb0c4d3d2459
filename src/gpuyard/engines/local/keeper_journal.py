"""The engine's journal: what keepers write when work begins and when it is over, and what it means.

Lines such as `17.1 4242 began .` and `17.1 4242 0 4301 1700000000.123 .`: the job's attempt, the keeper's pid, and a
word or the program's status with its pid and the time. The keeper's pid is there because an attempt that was never
begun may be prepared again under the same number. A line that a full disk cut off lacks its dot, or was joined by
another's beginning; it says nothing.
"""

import re
import signal
from collections.abc import Iterator

from msgspec import Struct

from gpuyard.core.job.job import Outcome, OutcomeKind

BEGAN, UNBEGUN, HELLO = "began", "unbegun", "hello"
_LINE = re.compile(rb"([0-9]+\.[0-9]+) ([0-9]+) ([0-9]+|[a-z-]+)(?: ([0-9]+)(?: ([0-9]+\.[0-9]+))?)? \.")
_BY_SIGNAL = 128
_CANNOT_EXECUTE, _NOT_FOUND = 126, 127


class JournalEntry(Struct, frozen=True):
    """`pid` is the program's and `at` the time of its end, where it ran."""

    key: str
    keeper: int
    word: str
    pid: int | None = None
    at: float | None = None


class StartContext(Struct, frozen=True, kw_only=True):
    """What an attempt needs to start, for the words in which it is told that it could not."""

    directory: str | None = None
    program: str | None = None
    stdin: str | None = None


def parse(text: bytes) -> tuple[list[JournalEntry], int]:
    """The entries of all whole lines, and how much of the text those lines were."""
    end = text.rfind(b"\n") + 1
    return list(_entries(text[:end])), end


def _entries(lines: bytes) -> Iterator[JournalEntry]:
    for line in lines.split(b"\n"):
        match = _LINE.fullmatch(line)
        if match is not None:
            pid = int(match[4]) if match[4] is not None else None
            at = float(match[5]) if match[5] is not None else None
            yield JournalEntry(match[1].decode(), int(match[2]), match[3].decode(), pid, at)


def outcome_of(word: str | None, things: StartContext) -> Outcome:
    """What the last word on an attempt says, when its keeper is gone or has no more to say."""
    if word is None or word == UNBEGUN:
        return Outcome(kind=OutcomeKind.NEVER_STARTED, reason="the daemon was gone before it could begin")
    if word == BEGAN:
        return Outcome(
            kind=OutcomeKind.LOST, reason="its keeper is gone and left no status: it was killed, or the machine was"
        )
    return _of_status(int(word)) if word.isdigit() else _of_hindrance(word, things)


def _of_status(status: int) -> Outcome:
    if status == 0:
        return Outcome(kind=OutcomeKind.SUCCEEDED, status=0)
    return Outcome(kind=OutcomeKind.FAILED, status=status, reason=_in_words(status))


def _in_words(status: int) -> str:
    try:
        return f"signal {status - _BY_SIGNAL} ({signal.Signals(status - _BY_SIGNAL).name})"
    except ValueError:
        return f"exit status {status}"


def _of_hindrance(word: str, things: StartContext) -> Outcome:
    reasons = {
        "no-directory": f"the directory {things.directory or 'of the job'} is not there, or cannot be entered",
        "no-program": f"there is no program {things.program or 'of that name'}",
        "not-executable": f"{things.program or 'the program'} cannot be executed",
        "too-long": "the command with its environment is longer than the system allows",
        "no-log": "the log cannot be written",
        "no-stdin": f"the input {things.stdin or 'of the job'} cannot be read",
        "stdin-is-pipe": f"the input {things.stdin or 'of the job'} is a named pipe: a file is needed",
        "no-process": "the system would not make another process",
    }
    reason = reasons.get(word)
    if reason is None:
        return Outcome(kind=OutcomeKind.LOST, reason=f"its keeper left a word that nobody knows: {word}")
    status = _NOT_FOUND if word == "no-program" else _CANNOT_EXECUTE
    return Outcome(kind=OutcomeKind.CANNOT_START, status=status, reason=reason)
