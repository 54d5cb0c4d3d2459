"""Checks that a program can be started, and derives its outcome from the word of its keeper or supervisor. Pure."""

import os
import signal
from typing import Self

from msgspec import Struct

from gpuyard.core.job.container import CONTAINER_TOOLS
from gpuyard.core.job.job import Outcome, OutcomeKind
from gpuyard.core.scheduling.start_backoff import ResourceLimit
from gpuyard.engines.common.spawn_program import BY_SIGNAL, START_FAILURES, StartFailure
from gpuyard.engines.common.unbegun_words import describe, is_unbegun
from gpuyard.errors import UserError
from gpuyard.ports import Launch

BEGAN = "began"
# The exit status of docker and podman when they could not run the container. Their other failures are above.
TOOL_FAILED = 125


def check_arguments(launch: Launch, environment: dict[str, str]) -> None:
    """Raise UserError for zero bytes, lone UTF-16 surrogates and variables without a proper name."""
    texts = (*launch.command, launch.cwd, launch.stdin or "", *_outputs(launch), *environment, *environment.values())
    try:
        is_passable = b"\0" not in os.fsencode("".join(texts)) and "" not in environment
    except UnicodeEncodeError:
        is_passable = False
    if not is_passable or "=" in "".join(environment):
        raise UserError(
            f"the command of job {launch.job_id} cannot be passed to a program: an argument or variable has a zero byte"
            " or an incomplete character, or the name of a variable is invalid",
            hint="check its arguments, and the environment it was submitted with",
        )


class StartContext(Struct, frozen=True, kw_only=True):
    """What an attempt needs to start, for the message if it could not."""

    directory: str | None = None
    program: str | None = None
    stdin: str | None = None
    output: str | None = None

    @classmethod
    def of(cls, launch: Launch) -> Self:
        output = " or ".join(_outputs(launch))
        return cls(directory=launch.cwd, program=launch.command[0], stdin=launch.stdin, output=output)


def _outputs(launch: Launch) -> list[str]:
    return [path for path in (launch.output, launch.error) if path is not None]


def outcome_of(word: str | None, context: StartContext) -> Outcome:
    """Return the outcome of an attempt that is over, by the last word on it; None if there is none."""
    if word is None or is_unbegun(word):
        limit = limit_of(word)
        reason = "the daemon or its keeper was gone before it could start" if limit is None else limit.text
        return Outcome(kind=OutcomeKind.NEVER_STARTED, reason=reason)
    if word == BEGAN:
        return Outcome(
            kind=OutcomeKind.LOST, reason="its keeper is gone without a status: it was killed, or the machine went down"
        )
    if not word.isdigit():
        return _start_failure(word, context)
    if word == "0":
        return Outcome(kind=OutcomeKind.SUCCEEDED, status=0)
    try:
        reason = f"signal {int(word) - BY_SIGNAL} ({signal.Signals(int(word) - BY_SIGNAL).name})"
    except ValueError:
        reason = f"exit status {word}"
        if int(word) == TOOL_FAILED and context.program in CONTAINER_TOOLS:
            reason = f"{context.program} could not run the container ({reason}); see the job's log"
    return Outcome(kind=OutcomeKind.FAILED, status=int(word), reason=reason)


def limit_of(word: str | None) -> ResourceLimit | None:
    """Return the limit that kept an attempt from starting, by the last word on it; None if there was none."""
    text, remedy, is_own = describe(word or "")
    return ResourceLimit(text=text, remedy=remedy, is_own=is_own) if text else None


def _start_failure(word: str, context: StartContext) -> Outcome:
    if word not in START_FAILURES:
        return Outcome(kind=OutcomeKind.LOST, reason=f"its keeper wrote an unknown word: {word}")
    subject = {
        "no-directory": context.directory or "of the job",
        "no-program": context.program or "of that name",
        "not-executable": context.program or "the program",
        "no-output": context.output or "of the job",
        "unsafe-output": context.output or "of the job",
    }.get(word, context.stdin or "of the job")
    reason = START_FAILURES[word].format(subject)
    return Outcome(kind=OutcomeKind.CANNOT_START, status=StartFailure(word).status, reason=reason)
