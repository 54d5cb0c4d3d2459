"""Convert jobs, attempts, lanes and estimates to database columns and back.

A column has the name of its field, except for those in _FIELD_OF_COLUMN. Structures are stored as JSON.
"""

import json
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from gpuyard.model.job import Attempt, Job
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.placeholders import ArrayElement, fill_in
from gpuyard.policy.disk_and_system_limits import writes_files
from gpuyard.policy.queue_order import Lane

JOB_COLUMNS = (
    "id, spec, state, priority, user, submitted_at, group_id, group_limit, array_index, details, attempts, failures, "
    "due_at, started_at, ended_at, outcome, reason, queued_at, growth, not_before"
)
# The columns of the phase, and others that change while an attempt is live.
PHASE_COLUMNS = "handed_over_at, started_at, keeper_pid, pid, place, ended_at, outcome, lack"
PROGRESS_COLUMNS = (
    "stop_at, kill_at, stopping, warned_at, reserved_mb, parked, suspended_at, suspended_s, site_id, request, usage"
)
ATTEMPT_COLUMNS = (
    "job, number, boot_id, lease_id, devices, log, error_log, predicted_mb, engine, cpus, "
    f"{PHASE_COLUMNS}, {PROGRESS_COLUMNS}"
)
_FIELD_OF_COLUMN = {"group_id": "group", "array_index": "index", "job": "job_id"}
_JOB_FIELDS = [_FIELD_OF_COLUMN.get(column, column) for column in JOB_COLUMNS.split(", ")]
_ATTEMPT_FIELDS = [_FIELD_OF_COLUMN.get(column, column) for column in ATTEMPT_COLUMNS.split(", ")]
_read_progress = attrgetter(*PROGRESS_COLUMNS.split(", "))


def spec_to_text(spec: JobSpec) -> str:
    """Encode all but `dropped`. msgspec rejects lone surrogates, of variables that are not UTF-8."""
    spec = replace(spec, dropped=())
    try:
        return msgspec.json.encode(spec).decode()
    except UnicodeEncodeError:
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
    values |= {} if element.index is None else {"index": str(element.index)}
    command = spec.command if element.command is None else element.command
    filled = fill_in(command, values) if values else command
    return None if filled == spec.command else printable(" ".join(filled))


def printable(text: str | None) -> str | None:
    """Replace lone surrogates by "?". They stand for bytes of a path that are not UTF-8, and SQLite rejects them."""
    return None if text is None else text.encode(errors="replace").decode()


def to_json(value: Struct | None) -> str | None:
    """Encode without \\uXXXX escapes: an escaped lone surrogate could be stored, but not decoded again."""
    if value is None:
        return None
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return printable(json.dumps(to_builtins(value), ensure_ascii=False))


def job_from_row(row: tuple[Any, ...], spec: JobSpec) -> Job:
    fields = _read_fields(_JOB_FIELDS, row, ("details", "outcome", "growth"))
    return msgspec.convert({**fields, **fields.get("details", {}), "spec": spec}, Job)


def _phase_to_values(attempt: Attempt) -> tuple[Any, ...]:
    started, over = attempt.started, attempt.over
    live: tuple[Any, ...] = (attempt.since, None, 0, None, None)
    if started is not None:
        live = (None, started.at, started.keeper_pid, started.pid, printable(started.place))
    end = (None, None, None) if over is None else (over.at, to_json(over.outcome), to_json(over.lack))
    return (*live, *end)


def progress_to_values(attempt: Attempt) -> tuple[Any, ...]:
    *values, request, usage = _read_progress(attempt)
    return (*values, to_json(request), to_json(usage))


def phase_to_row(attempt: Attempt) -> tuple[Any, ...]:
    """Return all that changes, and what names the attempt."""
    return (*_phase_to_values(attempt), *progress_to_values(attempt), attempt.job_id, attempt.number)


def attempt_to_row(attempt: Attempt) -> tuple[Any, ...]:
    devices, cpus = " ".join(attempt.devices) or None, " ".join(map(str, attempt.cpus)) or None
    return (
        attempt.job_id, attempt.number, attempt.boot_id, attempt.lease_id, devices, attempt.log, attempt.error_log,
        attempt.predicted_mb, attempt.engine, cpus, *_phase_to_values(attempt), *progress_to_values(attempt),
    )  # fmt: skip


def attempt_from_row(row: tuple[Any, ...]) -> Attempt:
    """Each phase takes its own fields: `convert` ignores the others."""
    fields = _read_fields(_ATTEMPT_FIELDS, row, ("outcome", "lack", "request", "usage"))
    if "started_at" in fields:
        phase = {**fields, "type": "started", "at": fields["started_at"]}
    else:
        phase = {"type": "handed-over", "at": fields["handed_over_at"]}
    if "ended_at" in fields:
        phase = {**fields, "type": "over", "at": fields["ended_at"], "before": phase}
    lists = {"devices": fields.get("devices", "").split(), "cpus": [int(cpu) for cpu in fields.get("cpus", "").split()]}
    return msgspec.convert({**fields, **lists, "phase": phase}, Attempt)


def _read_fields(names: list[str], row: tuple[Any, ...], json_names: tuple[str, ...]) -> dict[str, Any]:
    """Return the values by field, without NULLs, so that fields have their defaults."""
    fields = {name: value for name, value in zip(names, row, strict=True) if value is not None}
    for name in json_names:
        if name in fields:
            fields[name] = json.loads(fields[name])
    return fields


def lane_of(job: Job, batch: int | None = None) -> Lane:
    """Return the lane of a job, with id 0. An array needs a lane of its own only if it has a limit or is staggered."""
    spec = job.spec
    return Lane(
        id=0,
        priority=job.priority,
        user=job.user,
        tag=spec.tag,
        need=spec.need,
        group=job.group if job.group_limit is not None or spec.stagger_s else None,
        group_limit=job.group_limit,
        batch=batch,
        sizes_each=spec.learns_memory,
        preempts=spec.preempts,
        pace=spec.pace,
        tag_sharing=spec.tag_sharing,
        writes_files=writes_files(spec),
        engine=spec.engine,
        stagger_s=spec.stagger_s,
        # Options besides the need for which an engine may refuse one job and accept another.
        demands=(*spec.engine_options, f"cpus={spec.cpus}", f"limit={spec.time_limit_s}") if spec.engine else (),
    )
