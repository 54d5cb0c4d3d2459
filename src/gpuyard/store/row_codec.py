"""Convert jobs, attempts, lanes and estimates to database columns and back."""

import json
from typing import Any

import msgspec
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from gpuyard.core.job.job import (
    Attempt,
    Growth,
    HandedOver,
    Job,
    JobSpec,
    MemoryLack,
    Outcome,
    OutcomeKind,
    Over,
    Started,
    SuspendedBy,
    Usage,
    fill_in,
)
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.submission import ArrayElement
from gpuyard.core.memory.estimates import Profile
from gpuyard.core.scheduling.queue_order import Lane

JOB_COLUMNS = (
    "id, spec, state, priority, user, submitted_at, group_id, group_limit, array_index, details, attempts, failures, "
    "due_at, started_at, ended_at, outcome, reason, queued_at, growth"
)
ATTEMPT_VALUES = (
    "boot_id, handed_over_at, started_at, keeper_pid, pid, place, ended_at, outcome, shortage, lease, devices, log, "
    "stop_at, kill_at, stopping, reserved_mb, predicted_mb, parked, suspended_at, suspended_s, usage, engine, site_id"
)
ATTEMPT_COLUMNS = f"job, number, {ATTEMPT_VALUES}"


def spec_to_text(spec: JobSpec) -> str:
    """Encode with the standard library: msgspec rejects the lone surrogates of a non-UTF-8 environment variable."""
    return json.dumps(to_builtins(spec))


def spec_from_text(text: str) -> JobSpec:
    return msgspec.convert(json.loads(text), JobSpec)


def lane_to_text(lane: Lane) -> str:
    """Encode all but the id. Equal lanes give equal texts."""
    fields = to_builtins(lane)
    del fields["id"]
    return json.dumps(fields, sort_keys=True)


def lane_from_text(lane_id: int, text: str) -> Lane:
    return msgspec.convert({"id": lane_id, **json.loads(text)}, Lane)


def details_to_text(element: ArrayElement) -> str | None:
    if element.command is not None:
        return json.dumps({"command": element.command})
    return json.dumps({"values": element.values}) if element.values else None


def own_command_text(spec: JobSpec, element: ArrayElement) -> str | None:
    """Return the command of this element as a search matches it, or None if it is the spec's."""
    values = dict(element.values) if element.command is None else {}
    if element.index is not None:
        values["index"] = str(element.index)
    command = spec.command if element.command is None else element.command
    filled = fill_in(command, values) if values else command
    return None if filled == spec.command else printable(" ".join(filled))


def printable(text: str | None) -> str | None:
    """Replace lone surrogates by "?". They stand for bytes of a path that are not UTF-8, and SQLite rejects them."""
    return None if text is None else text.encode(errors="replace").decode()


def outcome_to_text(outcome: Outcome | None) -> str | None:
    if outcome is None:
        return None
    return msgspec.json.encode(replace(outcome, reason=printable(outcome.reason))).decode()


def value_to_text(value: Struct | None) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def lack_to_text(lack: MemoryLack | None) -> str | None:
    """Encode without \\uXXXX escapes: an escaped lone surrogate could be stored, but not decoded again."""
    return None if lack is None else printable(json.dumps(to_builtins(lack), ensure_ascii=False))


def profile_to_text(profile: Profile) -> str:
    return msgspec.json.encode(replace(profile, label=printable(profile.label) or "")).decode()


def profile_from_text(text: str) -> Profile:
    return msgspec.json.decode(text, type=Profile)


def outcome_from_text(text: str | None) -> Outcome | None:
    return None if text is None else msgspec.json.decode(text, type=Outcome)


def job_from_row(row: tuple[Any, ...], spec: JobSpec) -> Job:
    details = json.loads(row[9]) if row[9] else {}
    command = details.get("command")
    return Job(
        id=row[0],
        spec=spec,
        state=JobState(row[2]),
        priority=row[3],
        user=row[4],
        submitted_at=row[5],
        group=row[6],
        group_limit=row[7],
        index=row[8],
        values=details.get("values", {}),
        command=None if command is None else tuple(command),
        attempts=row[10],
        failures=row[11],
        due_at=row[12],
        started_at=row[13],
        ended_at=row[14],
        outcome=outcome_from_text(row[15]),
        reason=row[16],
        queued_at=row[17],
        growth=Growth() if row[18] is None else msgspec.json.decode(row[18], type=Growth),
    )


def attempt_to_row(attempt: Attempt) -> tuple[Any, ...]:
    """Return the values of ATTEMPT_COLUMNS."""
    started, over = attempt.started, attempt.over
    return (
        attempt.job_id,
        attempt.number,
        attempt.boot_id,
        attempt.since if started is None else None,
        *((None,) * 4 if started is None else (started.at, started.keeper_pid, started.pid, printable(started.place))),
        *((None,) * 3 if over is None else (over.at, outcome_to_text(over.outcome), lack_to_text(over.lack))),
        attempt.lease_id,
        " ".join(attempt.devices) or None,
        attempt.log,
        attempt.stop_at,
        attempt.kill_at,
        attempt.stopping,
        attempt.reserved_mb,
        attempt.predicted_mb,
        attempt.parked,
        attempt.suspended_at,
        attempt.suspended_s,
        value_to_text(attempt.usage),
        attempt.engine,
        attempt.site_id,
    )


def attempt_from_row(row: tuple[Any, ...]) -> Attempt:
    return Attempt(
        job_id=row[0],
        number=row[1],
        boot_id=row[2],
        phase=_phase_from_columns(*row[3:11]),
        lease_id=row[11],
        devices=tuple(row[12].split()) if row[12] else (),
        log=row[13],
        stop_at=row[14],
        kill_at=row[15],
        stopping=None if row[16] is None else OutcomeKind(row[16]),
        reserved_mb=row[17],
        predicted_mb=row[18],
        parked=None if row[19] is None else SuspendedBy(row[19]),
        suspended_at=row[20],
        suspended_s=row[21],
        usage=None if row[22] is None else msgspec.json.decode(row[22], type=Usage),
        engine=row[23],
        site_id=row[24],
    )


def _phase_from_columns(  # noqa: PLR0913, PLR0917 - the columns
    handed_over_at: float, started_at: float | None, keeper_pid: int, pid: int | None, place: str | None,
    ended_at: float | None, outcome: str, shortage: str | None,
) -> HandedOver | Started | Over:  # fmt: skip
    live: HandedOver | Started = HandedOver(at=handed_over_at)
    if started_at is not None:
        live = Started(at=started_at, keeper_pid=keeper_pid, pid=pid, place=place)
    if ended_at is None:
        return live
    lack = None if shortage is None else msgspec.json.decode(shortage, type=MemoryLack)
    return Over(before=live, at=ended_at, outcome=msgspec.json.decode(outcome, type=Outcome), lack=lack)


def lane_of(job: Job, batch: int | None = None) -> Lane:
    """Return the lane of a job, with id 0. An array needs a lane of its own only if it has a limit."""
    return Lane(
        id=0,
        priority=job.priority,
        user=job.user,
        tag=job.spec.tag,
        need=job.spec.need,
        group=job.group if job.group_limit is not None else None,
        group_limit=job.group_limit,
        batch=batch,
        sizes_each=job.spec.learns_memory,
        preempts=job.spec.preempts,
        pace=job.spec.pace,
        tag_sharing=job.spec.tag_sharing,
        engine=job.spec.engine,
        demands=_demands(job.spec) if job.spec.engine else (),
    )


def _demands(spec: JobSpec) -> tuple[str, ...]:
    """Return the options besides the need for which an engine may refuse one job and accept another."""
    return (*spec.engine_options, f"cpus={spec.cpus}", f"limit={spec.time_limit_s}")
