"""The outcome of a program, by the word that its keeper or supervisor left about it. Pure."""

import signal

from msgspec import Struct

from gpuyard.core.job.job import Outcome, OutcomeKind

BEGAN, UNBEGUN = "began", "unbegun"
_BY_SIGNAL = 128
_CANNOT_EXECUTE, _NOT_FOUND = 126, 127


class StartContext(Struct, frozen=True, kw_only=True):
    """What an attempt needs to start, for the message if it could not."""

    directory: str | None = None
    program: str | None = None
    stdin: str | None = None


def outcome_of(word: str | None, context: StartContext) -> Outcome:
    """Return the outcome of an attempt that is over, by the last word on it; None if there is none."""
    if word is None or word == UNBEGUN:
        return Outcome(kind=OutcomeKind.NEVER_STARTED, reason="the daemon was gone before it could start")
    if word == BEGAN:
        return Outcome(
            kind=OutcomeKind.LOST, reason="its keeper is gone without a status: it was killed, or the machine went down"
        )
    if not word.isdigit():
        return _start_failure(word, context)
    if word == "0":
        return Outcome(kind=OutcomeKind.SUCCEEDED, status=0)
    return Outcome(kind=OutcomeKind.FAILED, status=int(word), reason=_describe_status(int(word)))


def _describe_status(status: int) -> str:
    try:
        return f"signal {status - _BY_SIGNAL} ({signal.Signals(status - _BY_SIGNAL).name})"
    except ValueError:
        return f"exit status {status}"


def _start_failure(word: str, context: StartContext) -> Outcome:
    reasons = {
        "no-directory": f"the directory {context.directory or 'of the job'} is missing, or cannot be entered",
        "no-program": f"there is no program {context.program or 'of that name'}",
        "not-executable": f"{context.program or 'the program'} cannot be executed",
        "too-long": "the command with its environment is longer than the system allows",
        "no-log": "the log cannot be written",
        "no-stdin": f"the input {context.stdin or 'of the job'} cannot be read",
        "stdin-is-pipe": f"the input {context.stdin or 'of the job'} is a named pipe: a file is needed",
        "no-process": "the system refused another process",
    }
    reason = reasons.get(word)
    if reason is None:
        return Outcome(kind=OutcomeKind.LOST, reason=f"its keeper wrote an unknown word: {word}")
    status = _NOT_FOUND if word == "no-program" else _CANNOT_EXECUTE
    return Outcome(kind=OutcomeKind.CANNOT_START, status=status, reason=reason)
