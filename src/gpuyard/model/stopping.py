"""The signal that a program gets before it is stopped, and the outcome that a stop gives its attempt."""

import re
import signal

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.job import Attempt, Job, Outcome, OutcomeKind
from gpuyard.model.job_spec import JobSpec, StopWarning
from gpuyard.model.lifecycle import JobState
from gpuyard.model.units import format_duration, parse_duration

# Slurm takes at most 65,535 s.
_LONGEST_LEAD_S = 64_800.0


def parse_warning(text: str) -> StopWarning:
    """Parse `USR1@5m`, `SIGUSR1@300` or `10`. The default time is 60 s."""
    word, at, time = text.strip().partition("@")
    lead_s = parse_duration(time) if at else 60.0  # as Slurm's
    if lead_s > _LONGEST_LEAD_S:
        raise UserError(f"--signal {text} is too early", hint=f"give at most {format_duration(_LONGEST_LEAD_S)}")
    match = re.fullmatch(r"(?:SIG)?([A-Z][A-Z0-9+-]*)|([0-9]{1,2})", word.strip().upper(), re.ASCII)
    known = signal.Signals.__members__
    number = None if match is None else int(match[2]) if match[2] else known.get(f"SIG{match[1]}")
    if number is None or not 1 <= number < signal.NSIG:
        hint = "write it as USR1@5m: a signal's name or number, and the time before the stop"
        raise UserError(f"--signal {text} names no signal", hint=hint)
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise UserError(f"--signal {text}: no program can handle this signal", hint="choose another, such as USR1")
    return StopWarning(signum=int(number), lead_s=lead_s)


def parse_signal_option(text: str | None, engine: str, time_limit_s: float | None) -> StopWarning | None:
    """Parse `--signal` for a job of this engine with this time limit."""
    if text is None:
        return None
    if engine not in ("", "slurm", "ray"):  # this machine, and the clusters on whose nodes our supervisor sends it
        hint = "leave it out, or use --engine local, slurm or ray"
        raise UserError(f"--signal is not supported on {engine}", hint=hint)
    if engine == "ray" and time_limit_s is None:
        raise UserError("--signal on ray needs a time limit: nothing else stops a job there", hint="add --time-limit")
    warning = parse_warning(text)
    check_lead(warning, time_limit_s)
    return warning


def check_lead(warning: StopWarning, time_limit_s: float | None) -> None:
    """Refuse a warning that would be due before the program has begun."""
    if time_limit_s is not None and time_limit_s <= warning.lead_s:
        raise UserError(
            f"--signal is due {format_duration(warning.lead_s)} before the end, and --time-limit is not longer",
            hint=f"give a shorter time, such as --signal {signal_name(warning.signum)}@{time_limit_s / 10:g}s",
        )


def signal_name(signum: int) -> str:
    """Return `USR1`, or the number of a signal without a name."""
    try:
        return signal.Signals(signum).name.removeprefix("SIG")
    except ValueError:
        return str(signum)


def warning_text(warning: StopWarning) -> str:
    """Return it as a user would type it."""
    return f"{signal_name(warning.signum)}@{warning.lead_s:g}s"


def warn_at(spec: JobSpec, state: JobState, attempt: Attempt) -> float | None:
    """Return when the warning is due; None if it was sent, or if there is none. An engine that places jobs itself sends
    its own. While a job is suspended its time limit pauses, and so does this."""
    warning = spec.warning
    if warning is None or attempt.warned_at is not None or attempt.engine:
        return None
    if attempt.stopping is OutcomeKind.PREEMPTED:
        return attempt.since
    if attempt.stopping is not None or state is not JobState.RUNNING or attempt.stop_at is None:
        return None
    return attempt.stop_at - warning.lead_s


class StopTimes(Struct, frozen=True, kw_only=True):
    """When an attempt is asked to stop, and when it is killed."""

    stop_at: float
    kill_at: float


def stop_times(spec: JobSpec, attempt: Attempt, kind: OutcomeKind, now: float) -> StopTimes:
    """Return when to stop an attempt: now; a preempted one when its warning has run out. Lost memory has no grace."""
    stop_at = now
    if kind is OutcomeKind.PREEMPTED and spec.warning is not None and not attempt.engine:
        stop_at = max(now, (now if attempt.warned_at is None else attempt.warned_at) + spec.warning.lead_s)
    grace_s = 0.0 if kind is OutcomeKind.NOT_RESTORED else spec.grace_s
    return StopTimes(stop_at=stop_at, kill_at=stop_at + grace_s)


STOP_REASONS = {
    OutcomeKind.CANCELLED: "cancelled",
    OutcomeKind.TIMED_OUT: "over its time limit",
    OutcomeKind.PREEMPTED: "preempted by an urgent job",
    OutcomeKind.NOT_RESTORED: "suspended, and could not be resumed",
    OutcomeKind.MEMORY_GUARD: "its GPU was about to run out of memory",
    OutcomeKind.HOST_GUARD: "the machine was about to run out of RAM",
}
# Begins the reason of a job that is being stopped.
STOPPING = "stopping: "


def outcome_after_stop(job: Job, attempt: Attempt, outcome: Outcome) -> Outcome:
    """Return the outcome of an attempt that ended: that of its stop, if it was asked to stop, or was warned."""
    guards = (OutcomeKind.MEMORY_GUARD, OutcomeKind.HOST_GUARD)
    # A preempted program that succeeded before it was stopped need not run again.
    had_succeeded = attempt.stopping in (OutcomeKind.PREEMPTED, *guards) and outcome.kind is OutcomeKind.SUCCEEDED
    if attempt.stopping is not None and not had_succeeded:
        reason, seen = STOP_REASONS[attempt.stopping], job.reason or ""
        if attempt.stopping in guards and seen.startswith(STOPPING):  # what a guard saw is recorded with the job
            reason = seen.removeprefix(STOPPING)
        return replace(outcome, kind=attempt.stopping, reason=reason, error_line=None)
    if attempt.stopping is None and attempt.warned_at is not None and outcome.kind is OutcomeKind.FAILED:
        reason = f"{outcome.reason or outcome.kind} after the signal before its time limit"
        return replace(outcome, kind=OutcomeKind.TIMED_OUT, reason=reason)
    return outcome
