"""Makes the rows and details of jobs that the API answers with: attempts, memory, progress, code and advice."""

import asyncio
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from gpuyard.daemon.api.codec import copy_fields, wall_time
from gpuyard.daemon.job_code import CodeWatch
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.engines.common.program_outcome import loaded_libraries, read_tail
from gpuyard.model.command_line import short_command
from gpuyard.model.container import without_values
from gpuyard.model.dependencies import DependencyOutlook, outlook
from gpuyard.model.energy import EnergyFigures, EnergyUse, add_energy, energy_figures
from gpuyard.model.job import Attempt, Job, MemoryLack, Usage
from gpuyard.model.job_progress import Figure, FigureCurves, time_left
from gpuyard.model.job_spec import changed_script_text, commit_text
from gpuyard.model.lease import FixedMemory, Need, PartOfDevice, WholeDevice
from gpuyard.model.lifecycle import LIVE, WAITING, JobState
from gpuyard.model.out_of_memory import ShortageKind
from gpuyard.model.stopping import warning_text
from gpuyard.model.subscriptions import redacted_target
from gpuyard.policy.device_state import capacity
from gpuyard.policy.estimates import is_consistent, memory_estimate
from gpuyard.policy.host_room import grantable_mb
from gpuyard.policy.machine import check_suitable
from gpuyard.policy.preallocation import find_preallocation
from gpuyard.queue.measure_usage import EVENT as PREALLOCATES
from gpuyard.schema import jobs as schema
from gpuyard.schema.jobs import JobCode, NextMemory, ProgressRow


def next_memory(scheduler: SchedulerLoop, job: Job) -> NextMemory | None:
    """Return what its next run gets on each GPU, and on which basis; None if it needs no GPU."""
    if not job.spec.need.devices:
        return None
    need, known = _need(scheduler, job), None
    basis: Literal["declared", "learned", "grown", "unknown"] = "declared"
    if job.spec.learns_memory:
        profiles = scheduler.controller.transitions.estimates.profiles(job)
        consistent = [each for each in profiles if each is not None and is_consistent(each)]
        known = next((each for each in consistent if memory_estimate(each) is not None), None)
        basis = "learned" if known is not None else "unknown"
    is_grown = job.growth.is_alone or job.growth.memory_mb is not None
    return NextMemory(
        basis="grown" if is_grown else basis,
        given_mb=need.required_mb,
        alone=need.is_exclusive,
        runs=len(known.peaks_mb) if known is not None else None,
        same_command=known.is_exact if known is not None else None,
    )


def _need(scheduler: SchedulerLoop, job: Job) -> Need:
    if job.spec.engine:
        return scheduler.controller.transitions.estimates.need_elsewhere(job)
    controller, snapshot = scheduler.controller, scheduler.sampling.latest.snapshot
    devices, most_mb = snapshot.usable_devices(), grantable_mb(snapshot.host, controller.rules.host.limits)
    estimates, first_runs = controller.transitions.estimates, controller.rules.first_runs
    need = estimates.need(job.id, devices, first_runs, grantable_mb=most_mb)
    if not isinstance(need.memory, PartOfDevice):
        return need
    suiting = [size for each in devices if check_suitable(need, each) is None and (size := capacity(each)) is not None]
    return replace(need, memory=FixedMemory(need.memory.part * min(suiting, default=0.0)))  # the least that it may get


def advice(scheduler: SchedulerLoop, job: Job, code: JobCode, attempts: Sequence[Attempt]) -> list[str]:
    """Return what a user should know about the script; and hints that would let other jobs share its GPU: a framework
    that takes all memory, a --vram that is far off."""
    script = None
    if code.script is not None and code.snapshot is None:
        is_over, changed = job.ended_at is not None, code.changed_attempts
        script = changed_script_text(code.script, is_changed=code.script_changed, attempts=changed, is_over=is_over)
    taken = preallocation_advice(scheduler, job) or (_takes_all(scheduler, job, attempts[-1]) if attempts else None)
    declared = [text for _, kind, text in scheduler.queries.events(job.id) if kind == "declared"]
    return [text for text in (script, taken, *declared[-1:]) if text]


def preallocation_advice(scheduler: SchedulerLoop, job: Job) -> str | None:
    """Return the last advice that was recorded about a framework that takes all memory."""
    return next((text for _, kind, text in reversed(scheduler.queries.events(job.id)) if kind == PREALLOCATES), None)


def _takes_all(scheduler: SchedulerLoop, job: Job, attempt: Attempt) -> str | None:
    peak = attempt.usage.peak_mb if attempt.usage is not None else None
    devices = filter(None, map(scheduler.sampling.latest.snapshot.device, attempt.devices))
    total = min((device.memory_total_mb for device in devices if device.memory_total_mb), default=None)
    if peak is None or total is None or peak < total / 2:
        return None  # too little for preallocation: the log need not be read
    traces = "\n".join(read_tail(Path(log)) for log in (attempt.log, attempt.error_log) if log is not None)
    if attempt.ended_at is None and attempt.pid is not None:
        traces += "\n" + loaded_libraries(attempt.pid)
    found = find_preallocation(job.argv, job.spec.environment, traces, peak, total)
    return None if found is None else found[1]


def progress_row(scheduler: SchedulerLoop, attempt: Attempt | None) -> ProgressRow | None:
    progress = None if attempt is None or attempt.usage is None else attempt.usage.progress
    if attempt is None or progress is None or progress.amount is None:
        return None
    amount, fraction = progress.amount, progress.fraction
    left = time_left(progress, attempt.ran_s(scheduler.clock.now())) if attempt.ended_at is None else None
    return ProgressRow(
        done=amount.done,
        total=amount.total,
        unit=amount.unit,
        percent=None if fraction is None else round(100 * fraction, 2),
        left_s=None if left is None else round(left.likely_s, 1),
        at_s=progress.at_s,
        told=progress.is_told,
    )


def figures_of(attempt: Attempt | None) -> dict[str, Figure]:
    progress = None if attempt is None or attempt.usage is None else attempt.usage.progress
    return {} if progress is None else progress.figures


async def code_of(scheduler: SchedulerLoop, watch: CodeWatch, job: Job) -> JobCode:
    code, snapshot, stored = job.spec.code, job.spec.code.snapshot, scheduler.store.specs.code
    is_dirty = stored.is_dirty(job.id) if code.root is not None else None
    return JobCode(
        root=code.root,
        commit=code.commit,
        dirty=is_dirty,
        script=code.script,
        digest=code.digest,
        script_changed=await watch.is_changed(code) if snapshot is None else None,
        changed_attempts=stored.changed_scripts(job.id) if code.script is not None else (),
        snapshot=None if snapshot is None else snapshot.folder,
        snapshot_exists=None if snapshot is None else await asyncio.to_thread(os.path.isdir, snapshot.folder),
        text=commit_text(code.commit, is_dirty=is_dirty),
    )


def summarise(scheduler: SchedulerLoop, job: Job, attempt: Attempt | None, reason: str | None) -> schema.JobSummary:
    """Return what all rows about a job have; `attempt` is its last one."""
    outcome = job.outcome
    return schema.JobSummary(
        id=job.id,
        state=job.state,
        outcome=None if outcome is None else outcome.kind,
        status=None if outcome is None else outcome.status,
        reason=reason,
        error_line=None if outcome is None else outcome.error_line,
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
    estimated_mb = elapsed_s = None
    if job.state in WAITING:  # what it would get on each GPU now
        estimated_mb = (_need(scheduler, job) if job.spec.learns_memory or job.growth.count else need).required_mb
    if attempt is not None and job.attempts and job.state in LIVE:  # without the time in which it was suspended
        elapsed_s = None if attempt.started is None else attempt.ran_s(now)
    elif attempt is not None and job.attempts and job.ended_at is not None:
        elapsed_s = attempt.ran_s(job.ended_at)
    return copy_fields(
        schema.JobRow,
        summarise(scheduler, job, attempt, reason),
        job,
        job.spec,
        tag=job.spec.tag or None,
        command=command,
        is_command_cut=is_cut,
        gpus=need.devices,
        vram_mb=need.required_mb,
        exclusive=isinstance(need.memory, WholeDevice),
        reserved_mb=attempt.reserved_mb if attempt is not None else None,
        estimated_mb=estimated_mb,
        gpu_labels=gpu_labels(scheduler, attempt),
        attempt=job.attempts,
        elapsed_s=elapsed_s,
        waited_s=max(0.0, now - job.submitted_at) if is_waiting else None,
        due_at=wall_time(scheduler, job.due_at),
        array=job.group,
        engine=job.spec.engine or "local",
        place=attempt.place if attempt is not None else None,
        not_before=wall_time(scheduler, job.not_before),
        group=None,
    )


def make_details(scheduler: SchedulerLoop, job: Job, code: JobCode, *, with_environment: bool) -> schema.JobDetails:
    """Return all details of a job. Values of its variables may be secrets: they are left out by default."""
    attempts = all_attempts(scheduler, job)
    spec, growth = job.spec, job.growth
    return copy_fields(
        schema.JobDetails,
        make_row(scheduler, job, job.reason, has_whole_command=True),
        spec,
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
        growth=copy_fields(schema.GrownNeed, growth, alone=growth.is_alone) if growth.count else None,
        after=[
            schema.DependencyRow(id=other, kind=kind, state=state, met=outlook(kind, state) is DependencyOutlook.MET)
            for other, kind, state in scheduler.store.dependencies(job.id)
        ],
        attempts=[_make_attempt(scheduler, attempt) for attempt in attempts],
        device_labels=labels_by_id(scheduler, (device for each in attempts for device in each.devices)),
        memory=next_memory(scheduler, job),
        energy=_energy(scheduler, [each.usage for each in attempts if each.usage is not None]),
        advice=advice(scheduler, job, code, attempts),
        code=code,
    )


def gpu_labels(scheduler: SchedulerLoop, attempt: Attempt | None) -> list[str | None]:
    return list(labels_by_id(scheduler, attempt.devices).values()) if attempt is not None else []


def labels_by_id(scheduler: SchedulerLoop, device_ids: Iterable[str]) -> dict[str, str | None]:
    return {device_id: scheduler.sampling.latest.snapshot.labels.get(device_id) for device_id in device_ids}


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
        schema.AttemptRow,
        attempt,
        usage,
        lease=attempt.lease_id,
        started_at=wall_time(scheduler, attempt.started_at),
        ended_at=wall_time(scheduler, attempt.ended_at),
        outcome=outcome and outcome.kind,
        status=outcome and outcome.status,
        reason=outcome and outcome.reason,
        error_line=outcome and outcome.error_line,
        energy=_energy(scheduler, [usage]),
        ran_s=attempt.ran_s(scheduler.clock.now() if attempt.ended_at is None else attempt.ended_at),
        suspended_at=wall_time(scheduler, attempt.suspended_at),
        warned_at=wall_time(scheduler, attempt.warned_at),
        lack=None if attempt.lack is None else _make_lack(usage, attempt.lack),
        engine=attempt.engine or "local",
        progress=progress_row(scheduler, attempt),
        figures=figures_of(attempt),
        figure_curves=FigureCurves() if usage.progress is None else usage.progress.curves,
    )


def _energy(scheduler: SchedulerLoop, usages: Iterable[Usage]) -> EnergyFigures | None:
    total: EnergyUse | None = None
    for use in (each.energy for each in usages):
        total = total if use is None else add_energy(total, use)
    return None if total is None else energy_figures(total, scheduler.controller.rules.energy_price)


def _make_lack(usage: Usage, lack: MemoryLack) -> schema.MissingMemory:
    short = lack.shortage
    seen = usage.peak_mb if short.where is ShortageKind.DEVICE else usage.ram_mb
    held = max((figure for figure in (seen, short.held_mb) if figure is not None), default=None)
    return copy_fields(
        schema.MissingMemory,
        short,
        held_mb=held,
        needed_mb=None if short.asked_mb is None else (held or 0.0) + short.asked_mb,
        had_mb=None if short.free_mb is None else (held or 0.0) + short.free_mb,
        others=[schema.MemoryHolder(who=who, memory_mb=held_mb) for who, held_mb in lack.others],
    )
