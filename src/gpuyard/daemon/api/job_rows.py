"""Makes the rows and details of jobs that the API answers with."""

import shlex
import time
from collections.abc import Sequence

from msgspec.structs import asdict

from gpuyard.core.job.dependencies import DependencyOutlook, outlook
from gpuyard.core.job.job import Attempt, DependencyKind, Growth, Job, MemoryLack, Usage
from gpuyard.core.job.lifecycle import LIVE, WAITING, JobState
from gpuyard.core.lease import Need, WholeDevice
from gpuyard.core.memory.estimates import Profile, memory_estimate, prediction_error
from gpuyard.core.memory.out_of_memory import ShortageKind
from gpuyard.core.notify.subscriptions import redacted_target
from gpuyard.core.snapshot import Snapshot
from gpuyard.core.snapshot_json import iso_time
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.schema.batches import EstimateRow
from gpuyard.schema.jobs import (
    AttemptRow,
    DependencyRow,
    GrownNeed,
    JobDetails,
    JobRow,
    MemoryHolder,
    MissingMemory,
    NextMemory,
    NotifyRow,
)


def make_row(scheduler: SchedulerLoop, job: Job, next_need: Need, reason: str | None) -> JobRow:
    """Return a job's row in a list. `next_need` is what it gets when it starts."""
    attempt, snapshot, now = last_attempt(scheduler, job), scheduler.sampling.latest.snapshot, time.time()
    need, outcome = job.spec.need, job.outcome
    devices = attempt.devices if attempt is not None and job.attempts else ()
    return JobRow(
        id=job.id,
        name=job.spec.name,
        state=job.state,
        tag=job.spec.tag or None,
        priority=job.priority,
        user=job.user,
        command=shlex.join(job.argv),
        gpus=need.devices,
        vram_mb=need.required_mb,
        exclusive=isinstance(need.memory, WholeDevice),
        learns_memory=job.spec.learns_memory,
        reserved_mb=attempt.reserved_mb if attempt is not None else None,
        estimated_mb=next_need.required_mb if job.state in WAITING else None,
        devices=devices,
        gpu_indexes=[gpu_index(device_id, snapshot) for device_id in devices],
        attempt=job.attempts,
        submitted_at=iso_time(job.submitted_at),
        started_at=iso_time(job.started_at),
        ended_at=iso_time(job.ended_at),
        elapsed_s=_elapsed_s(job, attempt, now),
        waited_s=_waited_s(job, now),
        time_limit_s=job.spec.time_limit_s,
        status=outcome.status if outcome is not None else None,
        outcome=outcome.kind if outcome is not None else None,
        reason=reason,
        array=job.group,
        index=job.index,
        log=attempt.log if attempt is not None else None,
        engine=job.spec.engine or "local",
        place=attempt.place if attempt is not None else None,
    )


def make_details(  # noqa: PLR0913 - details are made of these
    row: JobRow,
    job: Job,
    attempts: Sequence[Attempt],
    after: Sequence[tuple[int, DependencyKind, JobState]],
    *,
    memory: NextMemory | None,
    advice: list[str],
    with_environment: bool,
    now: float,
) -> JobDetails:
    """Return all details of a job. Values of its variables may be secrets: they are left out by default."""
    spec = job.spec
    return JobDetails(
        **asdict(row),
        cwd=spec.cwd,
        stdin=spec.stdin,
        retries=spec.retries,
        failures=job.failures,
        grace_s=spec.grace_s,
        duration_s=spec.duration_s,
        on_reboot=spec.on_reboot,
        log_cap_mb=spec.log_cap_mb,
        values=job.values,
        environment_names=sorted(spec.environment),
        environment=dict(spec.environment) if with_environment else None,
        need=spec.need,
        preempts=spec.preempts,
        on_preempt=spec.on_preempt,
        cpus=spec.cpus,
        engine_options=spec.engine_options,
        notify=[
            NotifyRow(events=each.events, target=each.target and redacted_target(each.target)) for each in spec.notify
        ],
        growth=_make_growth(job.growth),
        after=[
            DependencyRow(id=other, kind=kind, state=state, met=outlook(kind, state) is DependencyOutlook.MET)
            for other, kind, state in after
        ],
        attempts=[_make_attempt(attempt, now) for attempt in attempts],
        memory=memory,
        advice=advice,
    )


def make_estimate(fingerprint: str, profile: Profile) -> EstimateRow:
    off = prediction_error(profile)
    return EstimateRow(
        fingerprint=fingerprint,
        label=profile.label,
        kind="command" if profile.is_exact else "program",
        runs=profile.count,
        measured_runs=len(profile.peaks_mb),
        memory_mb=memory_estimate(profile),
        peak_mb=max(profile.peaks_mb, default=None),
        floor_mb=profile.floor_mb,
        ram_mb=profile.ram_mb,
        load_percent=profile.load_percent,
        least_s=profile.least_s,
        mean_s=profile.mean_s,
        most_s=profile.most_s,
        predicted_mb=profile.predicted_mb,
        actual_mb=profile.actual_mb,
        off_percent=None if off is None else 100.0 * off,
        seen_at=iso_time(profile.seen_at),
    )


def gpu_index(device_id: str, snapshot: Snapshot) -> int | None:
    device = snapshot.device(device_id)
    return device.index if device is not None else None


def last_attempt(scheduler: SchedulerLoop, job: Job) -> Attempt | None:
    live = scheduler.controller.transitions.live.get(job.id)
    if live is not None:
        return live.attempt
    attempts = scheduler.store.attempts(job.id) if job.attempts else []
    return attempts[-1] if attempts else None


def _make_growth(growth: Growth) -> GrownNeed | None:
    """Return what the job gets after it ran out of memory; None if it never did."""
    if not growth.count:
        return None
    return GrownNeed(count=growth.count, memory_mb=growth.memory_mb, ram_mb=growth.ram_mb, alone=growth.is_alone)


def _make_attempt(attempt: Attempt, now: float) -> AttemptRow:
    outcome, usage = attempt.outcome, attempt.usage or Usage()
    return AttemptRow(
        number=attempt.number,
        pid=attempt.pid,
        devices=attempt.devices,
        lease=attempt.lease_id,
        started_at=iso_time(attempt.started_at) if attempt.has_started else None,
        ended_at=iso_time(attempt.ended_at),
        outcome=outcome.kind if outcome is not None else None,
        status=outcome.status if outcome is not None else None,
        reason=outcome.reason if outcome is not None else None,
        log=attempt.log,
        reserved_mb=attempt.reserved_mb,
        predicted_mb=attempt.predicted_mb,
        peaks_mb=usage.peaks_mb,
        ram_mb=usage.ram_mb,
        load_percent=usage.load_percent,
        curve=usage.curve,
        ran_s=attempt.ran_s(now if attempt.ended_at is None else attempt.ended_at),
        parked=attempt.parked,
        suspended_at=iso_time(attempt.suspended_at),
        suspended_s=attempt.suspended_s,
        lack=None if attempt.lack is None else _make_lack(attempt, attempt.lack),
        engine=attempt.engine or "local",
        place=attempt.place,
        site_id=attempt.site_id,
    )


def _make_lack(attempt: Attempt, lack: MemoryLack) -> MissingMemory:
    short, usage = lack.shortage, attempt.usage or Usage()
    seen = usage.peak_mb if short.where is ShortageKind.DEVICE else usage.ram_mb
    held = max((figure for figure in (seen, short.held_mb) if figure is not None), default=None)
    return MissingMemory(
        where=short.where,
        says=short.says,
        framework=short.framework,
        held_mb=held,
        asked_mb=short.asked_mb,
        free_mb=short.free_mb,
        total_mb=short.total_mb,
        needed_mb=None if short.asked_mb is None else (held or 0.0) + short.asked_mb,
        had_mb=None if short.free_mb is None else (held or 0.0) + short.free_mb,
        others=[MemoryHolder(who=who, memory_mb=held_mb) for who, held_mb in lack.others],
    )


def _elapsed_s(job: Job, attempt: Attempt | None, now: float) -> float | None:
    """Return how long the last attempt has run, without the time in which it was suspended."""
    if attempt is None or not job.attempts:
        return None
    if job.state in LIVE:
        return attempt.ran_s(now) if attempt.has_started else None
    return None if job.ended_at is None else attempt.ran_s(job.ended_at)


def _waited_s(job: Job, now: float) -> float | None:
    if (job.state in LIVE and job.state is not JobState.PENDING) or job.ended_at is not None:
        return None
    return max(0.0, now - job.submitted_at)
