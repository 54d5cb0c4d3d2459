"""Makes the rows and details of jobs that the API answers with."""

import shlex
from collections.abc import Iterable

from msgspec.structs import asdict

from gpuyard.core.job.container import without_values
from gpuyard.core.job.dependencies import DependencyOutlook, outlook
from gpuyard.core.job.job import Attempt, Job, MemoryLack, Usage
from gpuyard.core.job.lifecycle import LIVE, JobState
from gpuyard.core.job.short_command import short_command
from gpuyard.core.job.stop_warning import warning_text
from gpuyard.core.lease import WholeDevice
from gpuyard.core.memory.out_of_memory import ShortageKind
from gpuyard.core.notify.subscriptions import redacted_target
from gpuyard.core.report.energy import EnergyFigures, EnergyUse, add_energy, energy_figures
from gpuyard.daemon.api.codec import copy_fields
from gpuyard.daemon.api.job_code import code_advice
from gpuyard.daemon.api.memory_estimates import advice, estimated_mb, next_memory
from gpuyard.daemon.api.progress_rows import figure_curves, figures_of, progress_row
from gpuyard.daemon.api.wall_time import wall_time
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.schema import jobs as schema
from gpuyard.schema.code import JobCode


def summarise(scheduler: SchedulerLoop, job: Job, attempt: Attempt | None, reason: str | None) -> schema.JobSummary:
    """Return what all rows about a job have; `attempt` is its last one."""
    return schema.JobSummary(
        id=job.id,
        state=job.state,
        outcome=job.outcome.kind if job.outcome is not None else None,
        status=job.outcome.status if job.outcome is not None else None,
        reason=reason,
        error_line=job.outcome.error_line if job.outcome is not None else None,
        devices=attempt.devices if attempt is not None else (),
        submitted_at=wall_time(scheduler, job.submitted_at),
        started_at=wall_time(scheduler, job.started_at),
        ended_at=wall_time(scheduler, job.ended_at),
        log=attempt.log if attempt is not None else None,
        progress=progress_row(scheduler, attempt),
        figures=figures_of(attempt),
    )


def make_row(
    scheduler: SchedulerLoop, job: Job, reason: str | None, *, has_whole_command: bool = False
) -> schema.JobRow:
    """Return a job's row in a list, with a short command, or with the whole of it."""
    whole = shlex.join(job.argv)
    command, is_cut = (whole, False) if has_whole_command else short_command(whole)
    attempt, now, need = last_attempt(scheduler, job), scheduler.clock.now(), job.spec.need
    is_waiting = job.ended_at is None and (job.state not in LIVE or job.state is JobState.PENDING)
    return schema.JobRow(
        **asdict(summarise(scheduler, job, attempt, reason)),
        name=job.spec.name,
        tag=job.spec.tag or None,
        priority=job.priority,
        user=job.user,
        command=command,
        is_command_cut=is_cut,
        gpus=need.devices,
        vram_mb=need.required_mb,
        exclusive=isinstance(need.memory, WholeDevice),
        learns_memory=job.spec.learns_memory,
        reserved_mb=attempt.reserved_mb if attempt is not None else None,
        estimated_mb=estimated_mb(scheduler, job),
        gpu_labels=gpu_labels(scheduler, attempt),
        attempt=job.attempts,
        elapsed_s=_elapsed_s(job, attempt, now),
        waited_s=max(0.0, now - job.submitted_at) if is_waiting else None,
        due_at=wall_time(scheduler, job.due_at),
        time_limit_s=job.spec.time_limit_s,
        array=job.group,
        index=job.index,
        engine=job.spec.engine or "local",
        place=attempt.place if attempt is not None else None,
        resubmitted_from=job.spec.resubmitted_from,
        not_before=wall_time(scheduler, job.not_before),
        values=job.values,
        varies=job.spec.varies,
        group=None,
    )


def make_details(scheduler: SchedulerLoop, job: Job, code: JobCode, *, with_environment: bool) -> schema.JobDetails:
    """Return all details of a job. Values of its variables may be secrets: they are left out by default."""
    attempts = all_attempts(scheduler, job)
    spec, growth = job.spec, job.growth
    return copy_fields(
        spec,
        schema.JobDetails,
        **asdict(make_row(scheduler, job, job.reason, has_whole_command=True)),
        failures=job.failures,
        error_output=spec.error,  # an answer with `error` is a failed request
        signal=spec.warning and warning_text(spec.warning),
        environment_names=sorted(spec.environment),
        environment=dict(spec.environment) if with_environment else None,
        container=without_values(spec.container) if spec.container and not with_environment else spec.container,
        notify=[
            schema.NotifyRow(events=each.events, target=each.target and redacted_target(each.target))
            for each in spec.notify
        ],
        growth=copy_fields(growth, schema.GrownNeed, alone=growth.is_alone) if growth.count else None,
        after=[
            schema.DependencyRow(id=other, kind=kind, state=state, met=outlook(kind, state) is DependencyOutlook.MET)
            for other, kind, state in scheduler.store.dependencies(job.id)
        ],
        attempts=[_make_attempt(scheduler, attempt) for attempt in attempts],
        device_labels=labels_by_id(scheduler, (device for each in attempts for device in each.devices)),
        memory=next_memory(scheduler, job),
        energy=_attempt_energy(scheduler, _energy_of_all(attempts)),
        advice=[*code_advice(job, code), *advice(scheduler, job, attempts)],
        code=code,
    )


def gpu_label(scheduler: SchedulerLoop, device_id: str) -> str | None:
    return scheduler.sampling.latest.snapshot.labels.get(device_id)


def gpu_labels(scheduler: SchedulerLoop, attempt: Attempt | None) -> list[str | None]:
    return [gpu_label(scheduler, device_id) for device_id in attempt.devices] if attempt is not None else []


def labels_by_id(scheduler: SchedulerLoop, device_ids: Iterable[str]) -> dict[str, str | None]:
    return {device_id: gpu_label(scheduler, device_id) for device_id in device_ids}


def all_attempts(scheduler: SchedulerLoop, job: Job) -> list[Attempt]:
    """Return all attempts; a live one with its program's pid and its latest usage."""
    live = scheduler.controller.transitions.live.get(job.id)
    found = [each for each in scheduler.store.attempts(job.id) if live is None or each.ended_at is not None]
    return found if live is None else [*found, scheduler.with_own_pid(live.attempt)]


def last_attempt(scheduler: SchedulerLoop, job: Job) -> Attempt | None:
    live = scheduler.controller.transitions.live.get(job.id)
    if live is not None:
        return live.attempt
    attempts = scheduler.store.attempts(job.id) if job.attempts else []
    return attempts[-1] if attempts else None


def _make_attempt(scheduler: SchedulerLoop, attempt: Attempt) -> schema.AttemptRow:
    outcome, usage = attempt.outcome, attempt.usage or Usage()
    return copy_fields(
        attempt,
        schema.AttemptRow,
        lease=attempt.lease_id,
        started_at=wall_time(scheduler, attempt.started_at),
        ended_at=wall_time(scheduler, attempt.ended_at),
        outcome=outcome.kind if outcome is not None else None,
        status=outcome.status if outcome is not None else None,
        reason=outcome.reason if outcome is not None else None,
        error_line=outcome.error_line if outcome is not None else None,
        peaks_mb=usage.peaks_mb,
        ram_mb=usage.ram_mb,
        cpus_used=usage.cpus_used,
        load_percent=usage.load_percent,
        energy=_attempt_energy(scheduler, usage.energy),
        curve=usage.curve,
        ran_s=attempt.ran_s(scheduler.clock.now() if attempt.ended_at is None else attempt.ended_at),
        suspended_at=wall_time(scheduler, attempt.suspended_at),
        warned_at=wall_time(scheduler, attempt.warned_at),
        lack=None if attempt.lack is None else _make_lack(usage, attempt.lack),
        engine=attempt.engine or "local",
        progress=progress_row(scheduler, attempt),
        figures=figures_of(attempt),
        figure_curves=figure_curves(attempt),
    )


def _attempt_energy(scheduler: SchedulerLoop, use: EnergyUse | None) -> EnergyFigures | None:
    return None if use is None else energy_figures(use, scheduler.controller.rules.energy_price)


def _energy_of_all(attempts: Iterable[Attempt]) -> EnergyUse | None:
    total: EnergyUse | None = None
    for attempt in attempts:
        if attempt.usage is not None and attempt.usage.energy is not None:
            total = add_energy(total, attempt.usage.energy)
    return total


def _make_lack(usage: Usage, lack: MemoryLack) -> schema.MissingMemory:
    short = lack.shortage
    seen = usage.peak_mb if short.where is ShortageKind.DEVICE else usage.ram_mb
    held = max((figure for figure in (seen, short.held_mb) if figure is not None), default=None)
    return copy_fields(
        short,
        schema.MissingMemory,
        held_mb=held,
        needed_mb=None if short.asked_mb is None else (held or 0.0) + short.asked_mb,
        had_mb=None if short.free_mb is None else (held or 0.0) + short.free_mb,
        others=[schema.MemoryHolder(who=who, memory_mb=held_mb) for who, held_mb in lack.others],
    )


def _elapsed_s(job: Job, attempt: Attempt | None, now: float) -> float | None:
    """Return how long the last attempt has run, without the time in which it was suspended."""
    if attempt is None or not job.attempts:
        return None
    if job.state in LIVE:
        return None if attempt.started is None else attempt.ran_s(now)
    return None if job.ended_at is None else attempt.ran_s(job.ended_at)
