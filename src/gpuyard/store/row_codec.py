"""Rows and values: how jobs, attempts and lanes stand in the database, and how they are read back."""

import json
from typing import Any

import msgspec
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from gpuyard.core.job.job import (
    Attempt,
    Growth,
    Job,
    JobSpec,
    MemoryLack,
    Outcome,
    OutcomeKind,
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
ATTEMPT_COLUMNS = (
    "job, number, pid, boot_id, started_at, lease, devices, log, stop_at, kill_at, stopping, ended_at, outcome, "
    "reserved_mb, predicted_mb, parked, suspended_at, suspended_s, usage, shortage, engine, place, site_id"
)
# What lanes and their needs have had since later schemas.
_NEWER = ("pace", "crew", "part", "ignores_load", "ignores_foreign_load", "engine", "demands")


def spec_to_text(spec: JobSpec) -> str:
    """By the standard library: what is not UTF-8 in an environment is a lone surrogate, which msgspec refuses."""
    return json.dumps(to_builtins(spec))


def spec_from_text(text: str) -> JobSpec:
    return msgspec.convert(json.loads(text), JobSpec)


def lane_to_text(lane: Lane) -> str:
    """Without its id; the same text is the same lane."""
    shape = to_builtins(lane)
    del shape["id"]
    for newer in (shape, shape["need"]):  # as those were written that were there before these
        for name in _NEWER:
            if not newer.get(name):
                newer.pop(name, None)
    return json.dumps(shape, sort_keys=True)


def lane_from_text(lane_id: int, text: str) -> Lane:
    return msgspec.convert({"id": lane_id, **json.loads(text)}, Lane)


def details_to_text(element: ArrayElement) -> str | None:
    if element.command is not None:
        return json.dumps({"command": element.command})
    return json.dumps({"values": element.values}) if element.values else None


def command_shown(command: str, details: str | None, index: int | None) -> str:
    """The words of a job with spaces between them, from those of its spec and what is its own."""
    known = json.loads(details) if details else {}
    words = known.get("command") or [command]
    values = dict(known.get("values", {}))
    if index is not None:
        values["index"] = str(index)
    return " ".join(fill_in(words, values) if values else words)


def reason_to_text(reason: str | None) -> str | None:
    """A path in it need not be UTF-8, which SQLite refuses; what is written for people may lose that letter."""
    return None if reason is None else reason.encode(errors="replace").decode()


def outcome_to_text(outcome: Outcome | None) -> str | None:
    if outcome is None:
        return None
    return msgspec.json.encode(replace(outcome, reason=reason_to_text(outcome.reason))).decode()


def value_to_text(value: Struct | None) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def lack_to_text(lack: MemoryLack | None) -> str | None:
    """What a program wrote need not be UTF-8 either; written out as \\uXXXX it would be, and could not be read."""
    return None if lack is None else reason_to_text(json.dumps(to_builtins(lack), ensure_ascii=False))


def profile_to_text(profile: Profile) -> str:
    return msgspec.json.encode(replace(profile, label=reason_to_text(profile.label) or "")).decode()


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
    return (
        attempt.job_id,
        attempt.number,
        attempt.pid,
        attempt.boot_id,
        attempt.started_at,
        attempt.lease_id,
        " ".join(attempt.devices) or None,
        attempt.log,
        attempt.stop_at,
        attempt.kill_at,
        attempt.stopping,
        attempt.ended_at,
        outcome_to_text(attempt.outcome),
        attempt.reserved_mb,
        attempt.predicted_mb,
        attempt.parked,
        attempt.suspended_at,
        attempt.suspended_s,
        value_to_text(attempt.usage),
        lack_to_text(attempt.lack),
        attempt.engine,
        reason_to_text(attempt.place),
        attempt.site_id,
    )


def attempt_from_row(row: tuple[Any, ...]) -> Attempt:
    return Attempt(
        job_id=row[0],
        number=row[1],
        pid=row[2],
        boot_id=row[3],
        started_at=row[4],
        lease_id=row[5],
        devices=tuple(row[6].split()) if row[6] else (),
        log=row[7],
        stop_at=row[8],
        kill_at=row[9],
        stopping=None if row[10] is None else OutcomeKind(row[10]),
        ended_at=row[11],
        outcome=outcome_from_text(row[12]),
        reserved_mb=row[13],
        predicted_mb=row[14],
        parked=None if row[15] is None else SuspendedBy(row[15]),
        suspended_at=row[16],
        suspended_s=row[17],
        usage=None if row[18] is None else msgspec.json.decode(row[18], type=Usage),
        lack=None if row[19] is None else msgspec.json.decode(row[19], type=MemoryLack),
        engine=row[20],
        place=row[21],
        site_id=row[22],
    )


def lane_of(job: Job, batch: int | None = None) -> Lane:
    """Without an id yet. An array without a limit needs no lane of its own."""
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
        crew=job.spec.crew,
        engine=job.spec.engine,
        demands=_demands(job.spec) if job.spec.engine else (),
    )


def _demands(spec: JobSpec) -> tuple[str, ...]:
    """What one job may be refused for, and others with the same need are not."""
    return (*spec.engine_options, f"cpus={spec.cpus}", f"limit={spec.time_limit_s}")
