"""Explains why a job does not run, and tells its history."""

import shlex
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from gpuyard.daemon.api.codec import wall_time
from gpuyard.daemon.api.job_details import labels_by_id, preallocation_advice
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.errors import UserError
from gpuyard.model.dependencies import DependencyKind, DependencyState, awaited
from gpuyard.model.job import Attempt, Job, OutcomeKind, SuspendedBy
from gpuyard.model.lifecycle import FINISHED, IN_SUSPENSION, JobState
from gpuyard.model.selection import format_ids
from gpuyard.model.units import format_count, format_due, format_duration, format_time
from gpuyard.policy.plan import write_world
from gpuyard.policy.wait_reasons import Reason, ReasonKind, brief_of, describe_holder, group_by_device, job_of
from gpuyard.queue.live_attempts import Live
from gpuyard.schema.jobs import ExportedWorld, HistoryEvent, JobHistory, WaitExplanation


def explain(scheduler: SchedulerLoop, job: Job) -> WaitExplanation:
    """Return why it does not start or continue, or how it ended."""
    ahead = starts_at = None
    estimate = ""
    # A suspended job is in the queue again, but not for a while after a failed resume.
    now = scheduler.sampling.now()
    queues = scheduler.controller.suspend_control.queues(now)
    is_suspended = job.state is JobState.SUSPENDED and any(queue.lane.id == -job.id for queue in queues)
    if job.state is JobState.QUEUED or is_suspended:
        found = scheduler.controller.explain(job, scheduler.sampling.latest)
        ahead, starts_at = found.ahead, found.starts_at
        leaving = list(_leaving(scheduler, job))
        preempted = [_leaving_text(live, now) for live in leaving]
        reasons = (*_preemption_reasons(scheduler, job, preempted), *found.reasons) if found.reasons else ()
        reasons = tuple(replace(each, remedy=remedy_for(job, each.remedy, ahead)) for each in reasons)
        brief = (preempted or [_brief(scheduler, found.reasons)])[0] if reasons else None
        if ahead:
            text = f"{format_count(ahead, 'similar job')} {'is' if ahead == 1 else 'are'} ahead of it, "
            reasons = (Reason(ReasonKind.AWAITED, f"{text}the first is job {found.first_id}"), *reasons)
        if unreachable := tuple(reason for reason in found.reasons if reason.kind is ReasonKind.ENGINE):
            ahead, reasons = None, unreachable
        summary = _waiting_summary(job, brief, is_about_to=not reasons, is_suspended=is_suspended)
        if advice := next((each.remedy for each in reasons if each.remedy.startswith("`gpuyard edit")), ""):
            summary = f"{summary}; {advice}"
        if preempted:
            starts_at = scheduler.controller.suspend_control.frees_memory_at([live.job.id for live in leaving])
            starts_at = None if starts_at is None or starts_at < now else starts_at
            starts = (
                "it starts as soon as" if starts_at is None else f"it should start {format_due(starts_at - now)}, when"
            )
            estimate = f"{starts} they have freed their memory"
        elif not unreachable:
            estimate = _estimate_text(job, starts_at, now, is_suspended=is_suspended)
    else:
        reasons = tuple(_state_reasons(scheduler, job))
        summary = f"job {job.id} {_state_summary(job)}"
    return WaitExplanation(
        id=job.id,
        state=job.state,
        summary=summary,
        ahead=ahead,
        reasons=tuple(name_jobs(scheduler, reason) for reason in reasons),
        device_labels=labels_by_id(scheduler, (each.device_id for each in reasons if each.device_id)),
        estimated_start=wall_time(scheduler, starts_at),
        is_overdue=_is_overdue(starts_at, now),
        estimate=estimate,
    )


def export_world(scheduler: SchedulerLoop, job: Job) -> ExportedWorld:
    """Return what the plan about a waiting job follows from. UserError if this queue plans nothing about it."""
    is_waiting = job.state in (JobState.QUEUED, JobState.SUSPENDED) and not job.spec.engine
    found = scheduler.controller.explain(job, scheduler.sampling.latest) if is_waiting else None
    if found is None or found.world is None:
        hint = "a job that is queued or suspended on this machine can be exported"
        raise UserError(f"no plan is made about job {job.id}: it {_state_summary(job)}", hint=hint)
    return ExportedWorld(id=job.id, world=write_world(found.world, job.id, found.lane).decode())


def explain_briefly(scheduler: SchedulerLoop, job: Job) -> str | None:
    """Return in a few words why it waits, as of the last scheduling step."""
    if _was_preempted(scheduler, job):
        return _lane_reason(scheduler, -job.id) or job.reason
    if job.reason is not None or job.state is JobState.DELAYED:
        return _delay_text(scheduler, job) if job.state is JobState.DELAYED else job.reason
    if job.state is JobState.BLOCKED:
        waits_for = [other for other, _, _ in awaited(scheduler.store.dependencies(job.id))]
        return f"after {format_ids(waits_for[:100])}" if waits_for else None
    if job.state is not JobState.QUEUED:
        return None
    if scheduler.store.setting("paused"):
        return "the queue is paused"
    leaving = (_leaving_text(live, scheduler.sampling.now()) for live in _leaving(scheduler, job))
    return next(leaving, None) or _lane_reason(scheduler, scheduler.store.lane_of(job.id).id)


def job_history(
    scheduler: SchedulerLoop, job: Job, attempts: Sequence[Attempt], recorded: Sequence[tuple[float, str, str | None]]
) -> JobHistory:
    """Return everything that happened to it, in order."""
    origin = "" if job.spec.resubmitted_from is None else f", from job {job.spec.resubmitted_from}"
    events = [(job.submitted_at, "submitted", f"by {job.user}{origin}"), *recorded]
    snapshot = scheduler.sampling.latest.snapshot

    def name(device_id: str) -> str:
        is_known = snapshot.is_mixed and device_id in snapshot.labels
        return f"GPU {snapshot.labels[device_id]} ({device_id})" if is_known else device_id

    for attempt in attempts:
        where = f"on {', '.join(map(name, attempt.devices))}" if attempt.devices else "without a GPU"
        if attempt.engine:
            where = f"at {attempt.place or '?'}, {attempt.engine} {attempt.site_id or ''}".rstrip()
        elif attempt.pid is not None:
            where = f"{where}, pid {attempt.pid}"
        if attempt.started is not None:
            events.append((attempt.started.at, "started", f"attempt {attempt.number} {where}"))
        if attempt.over is not None:
            outcome = attempt.over.outcome
            how = _with_reason(outcome.kind, outcome.reason or f"exit status {outcome.status}")
            events.append((attempt.over.at, "ended", f"attempt {attempt.number} {how}"))
    # At the same time: an attempt ends before its consequences, and starts after its causes.
    rank = {"submitted": 0, "ended": 1, "started": 3}
    events.sort(key=lambda event: (event[0], rank.get(event[1], 2)))
    rows = [
        HistoryEvent(id=number, at=wall_time(scheduler, at), kind=kind, text="" if text == kind else text)
        for number, (at, kind, text) in enumerate(events)
    ]
    return JobHistory(id=job.id, events=rows)


def _lane_reason(scheduler: SchedulerLoop, lane_id: int) -> str | None:
    """Return the first specific reason why the first job of this lane waits."""
    hold = next((hold for hold in scheduler.controller.waiting if hold.lane.id == lane_id), None)
    return None if hold is None else _brief(scheduler, hold.reasons)


def _brief(scheduler: SchedulerLoop, reasons: Sequence[Reason]) -> str:
    """Return the specific reasons without their figures: the first about the machine, or those of each GPU."""
    snapshot, vague = scheduler.sampling.latest.snapshot, (ReasonKind.TOO_FEW, ReasonKind.NOT_ASKED_FOR)
    named = [name_jobs(scheduler, reason) for reason in reasons if reason.kind not in vague]
    if not named:
        return "every GPU is in use" if snapshot.usable_devices() else "no GPU was found"
    briefs = {each.brief for each in named if each.device_id is not None}
    if named[0].device_id is None or (len(briefs) == 1 and named[0].brief.startswith("until ")):
        return named[0].brief
    of_devices = [replace(each, text=each.brief) for each in named if each.device_id is not None]
    texts = group_by_device(of_devices, snapshot.labels)
    more = len(texts) - 4  # `why` has all
    return "; ".join(texts[:4]) + (f"; and {more} more reasons" if more > 0 else "")


def remedy_for(job: Job, remedy: str, ahead: int | None) -> str:
    """Return the part of a remedy that can be followed for this job: tasks of a workspace and runs of a batch are not
    edited, a task has no options, and those of a batch have other names."""
    is_single = job.spec.task is None and job.spec.pace is None
    if remedy.startswith("`--vram"):
        return remedy.replace("`", f"`gpuyard edit {job.id} ", 1) if is_single and not ahead else ""
    if job.spec.task is not None:
        return "; ".join(part for part in remedy.split("; ") if "--" not in part)
    return remedy if is_single else remedy.replace("--vram", "--run-vram").replace("--ram", "--run-ram")


def _was_preempted(scheduler: SchedulerLoop, job: Job) -> bool:
    live = scheduler.controller.transitions.live.get(job.id)
    return job.state is JobState.SUSPENDED and live is not None and live.attempt.parked is not SuspendedBy.BY_PERSON


def _leaving(scheduler: SchedulerLoop, job: Job) -> Iterator[Live]:
    """Yield the jobs that are being preempted for this one."""
    lower = (live for live in scheduler.controller.transitions.live.values() if live.job.priority < job.priority)
    for live in lower if job.spec.preempts else ():
        is_suspending = live.job.state is JobState.SUSPENDING and live.attempt.parked is SuspendedBy.FOR_ROOM
        if is_suspending or live.attempt.stopping is OutcomeKind.PREEMPTED:
            yield live


def _leaving_text(live: Live, now: float) -> str:
    if live.job.state is JobState.SUSPENDING:
        return f"job {live.job.id} is being suspended for it: its memory is moved to RAM"
    left_s = (live.attempt.stop_at or 0.0) - now
    saves = f", and has {format_duration(left_s)} to save its work" if left_s > 0 else ""
    return f"job {live.job.id} is being stopped for it{saves}"


def _preemption_reasons(scheduler: SchedulerLoop, job: Job, preempted: Sequence[str]) -> Iterator[Reason]:
    live = scheduler.controller.transitions.live.get(job.id)
    if live is not None and live.attempt.parked is SuspendedBy.MEMORY_GUARD and job.reason is not None:
        yield Reason(ReasonKind.SUSPENDED, job.reason)
    yield from (Reason(ReasonKind.MAKING_ROOM, text) for text in preempted)
    head = scheduler.controller.plan.head
    if job.spec.preempts and not preempted and head is not None and head.job_id == job.id:
        yield Reason(ReasonKind.MAKING_ROOM, "preempting jobs of lower priority would not free enough memory")


def _state_reasons(scheduler: SchedulerLoop, job: Job) -> Iterator[Reason]:
    if job.state is JobState.BLOCKED:
        for text in _dependency_texts(scheduler.store.dependencies(job.id)):
            yield Reason(ReasonKind.BLOCKED, text)
    elif job.state is JobState.DELAYED:
        yield Reason(ReasonKind.DELAYED, _delay_text(scheduler, job))
    elif job.state is JobState.HELD:
        yield Reason(ReasonKind.PAUSED, job.reason or "held")
    elif job.state is JobState.SUSPENDED and not _was_preempted(scheduler, job):
        yield Reason(ReasonKind.SUSPENDED, f"suspended by hand: `gpuyard resume {job.id}` continues it")
    elif job.state is JobState.PENDING:
        engine = job.spec.engine
        text = f"it is being submitted to {engine}" if engine else "it starts within a second, after jobs like it"
        yield Reason(ReasonKind.ENGINE, job.reason or text)
    elif job.state in IN_SUSPENSION and job.reason is not None:
        yield Reason(ReasonKind.SUSPENDED, job.reason)
    elif job.state is JobState.RUNNING and (advice := preallocation_advice(scheduler, job)) is not None:
        yield Reason(ReasonKind.PREALLOCATES, advice)


def _delay_text(scheduler: SchedulerLoop, job: Job) -> str:
    left_s = (job.due_at or 0.0) - scheduler.sampling.now()
    when = f"in {format_duration(left_s)}" if left_s >= 1 else format_due(left_s)
    if job.due_at != job.not_before:
        return f"next attempt {when}: {job.reason}"
    return f"not before {format_time(wall_time(scheduler, job.due_at))}, {when}"


def _dependency_texts(others: Sequence[DependencyState]) -> Iterator[str]:
    """Yield what a blocked job waits for. All jobs of an --after-failed set share one text."""
    left = awaited(others)
    one_of = [other for other, kind, _ in others if kind is DependencyKind.FAILED]
    may_fail = sum(kind is DependencyKind.FAILED for _, kind, _ in left)
    if may_fail and len(one_of) > 1:
        ids = format_ids(one_of[:100])
        yield f"one of the jobs {ids} must fail first; {may_fail} of {len(one_of)} have not ended"
    for other, kind, state in left:
        if kind is not DependencyKind.FAILED or len(one_of) == 1:
            must = {"ok": "must succeed", "any": "must end", "failed": "must fail"}[kind]
            yield f"job {other} is {state}; it {must} first"


def _waiting_summary(job: Job, brief: str | None, *, is_about_to: bool, is_suspended: bool) -> str:
    why = "" if brief is None else f"{' ' if brief.startswith('until ') else ': '}{brief}"
    if is_suspended:
        how = "is about to continue" if is_about_to else f"waits for free memory to continue{why}"
        return f"job {job.id} is suspended, and {how}"
    if is_about_to:
        return f"job {job.id} is about to start"
    count = job.spec.need.devices
    vendor = "" if job.spec.need.vendor is None else f"{job.spec.need.vendor} "
    gpus = f"{count} {vendor}GPU{'' if count == 1 else 's'}" if count else "a free slot"
    if not count and job.spec.need.host is not None:
        gpus = "RAM or CPUs"
    return f"job {job.id} waits for {job.spec.engine or gpus}{why}"


_STATE_TEXTS = {
    JobState.BLOCKED: "waits for other jobs",
    JobState.DELAYED: "will be tried again",
    JobState.PENDING: "was submitted to its engine, and waits there",
    JobState.RUNNING: "is running",
    JobState.SUSPENDING: "is being suspended: its memory is moved to RAM",
    JobState.SUSPENDED: "is suspended",
    JobState.RESUMING: "is being resumed: its memory is moved back",
    JobState.SUCCEEDED: "has succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "was cancelled",
    JobState.REJECTED: "was rejected",
}


def _state_summary(job: Job) -> str:
    text = _STATE_TEXTS.get(job.state) or f"is {job.reason or 'stopping'}"
    if job.state is JobState.DELAYED and job.due_at == job.not_before:  # not for another attempt
        text = f"waits for its start time; `gpuyard retry {job.id}` starts it now"
    elif job.state is JobState.HELD:
        text = f"is held; `gpuyard release {job.id}` lets it start"
    is_unsuccessful = job.state in FINISHED and job.state is not JobState.SUCCEEDED
    reason = job.reason or ("no reason was recorded" if is_unsuccessful else None)
    return _with_reason(text, reason) if reason is not None and job.state in FINISHED else text


def _with_reason(text: str, reason: str) -> str:
    """Return `failed: exit status 1`; a reason that the text already says is left out."""
    return text if text.endswith(reason) else f"{text}: {reason}"


def _estimate_text(job: Job, starts_at: float | None, now: float, *, is_suspended: bool) -> str:
    if starts_at is None:
        is_single = job.spec.task is None and job.spec.pace is None
        advice = " (`gpuyard submit --duration` says how long a job takes)" if is_single else ""
        return f"no start estimate yet: jobs like those before it have to finish first{advice}"
    when, verb = format_due(starts_at - now), "continue" if is_suspended else "start"
    if _is_overdue(starts_at, now):
        return f"{when}: the jobs before it take longer than expected"
    return f"it should {verb} {when}"


def _is_overdue(starts_at: float | None, now: float) -> bool:
    return starts_at is not None and starts_at <= now - 1.0


def name_jobs(scheduler: SchedulerLoop, reason: Reason) -> Reason:
    """Return the reason, with its brief form, and with the jobs of this queue as `job 17 (train)`; jobs of other users
    keep their user's name."""
    text, brief, me = reason.text, brief_of(reason), scheduler.controller.me
    for holder in reason.holders:
        job_id = job_of(holder) if (holder.uid, holder.machine) == (me.uid, me.machine) else None
        if job_id is None or (job := scheduler.store.job(job_id)) is None:
            continue
        name = shlex.join(job.argv)
        name = name if len(name) <= 40 else f"{name[:39]}…"
        if job.spec.name:
            name = f"{job.spec.name}{'' if job.index is None else f'[{job.index}]'}"
        text, brief = (each.replace(describe_holder(holder), f"job {job_id} ({name})") for each in (text, brief))
    return replace(reason, text=text, brief=brief)
