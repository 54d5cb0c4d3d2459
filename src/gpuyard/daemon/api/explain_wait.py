"""What people are told about the queue: its jobs in the order in which they will go, and why one does not run."""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import to_builtins

from gpuyard.core.job.dependencies import DependencyOutlook, outlook
from gpuyard.core.job.job import Attempt, Job, OutcomeKind, SuspendedBy
from gpuyard.core.job.lifecycle import FINISHED, IN_SUSPENSION, LIVE, JobState
from gpuyard.core.job.selection import format_ids
from gpuyard.core.scheduling.queue_order import full_order
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.snapshot_json import iso_time
from gpuyard.core.units import format_duration
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.store.job_search import LIVE_IN_ORDER, NOT_READY, RECENTLY_FINISHED

Event = tuple[float, str, str | None]

_SAYS_LITTLE = (ReasonKind.TOO_FEW, ReasonKind.NOT_ASKED_FOR)
_PAGE = 200


class Listing:
    """Jobs as they are asked for, fetched as they are needed."""

    def __init__(self, scheduler: SchedulerLoop) -> None:
        self._scheduler = scheduler
        self._store = scheduler.store
        self._catalogue = scheduler.queries

    def all(self, states: Sequence[JobState], *, show_all: bool) -> Iterator[Job]:
        """What runs, what waits in its order, what stands apart, and the last that finished."""
        wanted = set(states or JobState)
        for state in LIVE_IN_ORDER:
            yield from self._apart([state] if state in wanted else [])
        if JobState.QUEUED in wanted:
            yield from self._queued()
        yield from self._apart([state for state in NOT_READY if state in wanted])
        if wanted & FINISHED:
            yield from self._finished(wanted, None if show_all or states else RECENTLY_FINISHED)

    def _queued(self) -> Iterator[Job]:
        now = self._scheduler.sampling.now()
        used = self._scheduler.controller.transitions.used(now)
        for candidate in full_order(self._store.ready_queues(), used, now):
            job = self._store.job(candidate.job_id)
            if job is not None:
                yield job

    def _apart(self, states: list[JobState]) -> Iterator[Job]:
        offset = 0
        while states and (page := self._catalogue.in_state(states, _PAGE, offset)):
            yield from page
            offset += len(page)

    def _finished(self, wanted: set[JobState], most: int | None) -> Iterator[Job]:
        offset = 0
        while page := self._catalogue.finished(most or _PAGE, offset):
            yield from (job for job in page if job.state in wanted)
            offset += len(page)
            if most is not None:
                return


def why(scheduler: SchedulerLoop, job: Job) -> dict[str, Any]:
    """Why it does not start or go on, or how it ended."""
    ahead = starts_at = None
    estimate = ""
    goes_on = _waits_to_go_on(scheduler, job)
    if job.state is JobState.QUEUED or goes_on:
        told = scheduler.controller.explain(job, scheduler.sampling.latest)
        ahead, starts_at = told.ahead, told.starts_at
        reasons = (*_making_room(scheduler, job), *told.reasons) if told.reasons else ()
        if ahead:
            text = (
                f"{ahead} job{'' if ahead == 1 else 's'} like it came before it, the first of them is {told.first_id}"
            )
            reasons = (Reason(ReasonKind.BEHIND, text), *reasons)
        summary = _how_it_waits(job, is_about_to=not reasons, goes_on=goes_on)
        if any(_leaving(scheduler, job)):
            starts_at, estimate = None, "it starts as soon as they have made room"
        else:
            estimate = _estimate(starts_at, scheduler.sampling.now(), goes_on=goes_on)
    else:
        reasons = tuple(_plain_reasons(scheduler, job))
        summary = f"job {job.id} {_how_it_is(job)}"
    return {
        "id": job.id,
        "state": str(job.state),
        "summary": summary,
        "ahead": ahead,
        "reasons": [to_builtins(reason) for reason in reasons],
        "estimated_start": iso_time(starts_at),
        "estimate": estimate,
    }


def in_brief(scheduler: SchedulerLoop, job: Job) -> str | None:
    """Why it waits, in a few words, as the last step saw it."""
    if _is_parked_for_room(scheduler, job):
        return _held_up(scheduler, -job.id) or job.reason
    if job.reason is not None:
        return job.reason
    if job.state is JobState.BLOCKED:
        waits_for = [other for other, kind, state in scheduler.store.dependencies(job.id) if state not in FINISHED]
        return f"after {format_ids(waits_for[:100])}" if waits_for else None
    if job.state is not JobState.QUEUED:
        return None
    if scheduler.store.setting("paused"):
        return "the queue is paused"
    leaving = next(_leaving(scheduler, job), None)
    return leaving or _held_up(scheduler, scheduler.store.lane_of(job.id).id)


def _held_up(scheduler: SchedulerLoop, lane_id: int) -> str | None:
    hold = next((hold for hold in scheduler.controller.holds if hold.lane.id == lane_id), None)
    if hold is None:
        return None
    first = next((reason for reason in hold.reasons if reason.kind not in _SAYS_LITTLE), None)
    if first is None:
        return "every GPU is taken" if scheduler.sampling.latest.snapshot.usable_devices() else "no GPU is to be seen"
    device = scheduler.sampling.latest.snapshot.device(first.device_id) if first.device_id is not None else None
    return f"GPU {device.index}: {first.text}" if device is not None else first.text


# Those that are suspended, and those that others make room for


def _is_parked_for_room(scheduler: SchedulerLoop, job: Job) -> bool:
    live = scheduler.controller.transitions.live.get(job.id)
    return job.state is JobState.SUSPENDED and live is not None and live.attempt.parked is SuspendedBy.FOR_ROOM


def _waits_to_go_on(scheduler: SchedulerLoop, job: Job) -> bool:
    """Whether it stands in the line; one that could not be resumed a moment ago does not."""
    queues = scheduler.controller.suspend_control.queues(scheduler.sampling.now())
    return job.state is JobState.SUSPENDED and any(queue.lane.id == -job.id for queue in queues)


def _leaving(scheduler: SchedulerLoop, job: Job) -> Iterator[str]:
    """Who makes room for a job that may preempt."""
    lower = (live for live in scheduler.controller.transitions.live.values() if live.job.priority < job.priority)
    for live in lower if job.spec.preempts else ():
        if live.job.state is JobState.SUSPENDING and live.attempt.parked is SuspendedBy.FOR_ROOM:
            yield f"job {live.job.id} makes room: its memory is moved to RAM"
        elif live.attempt.stopping is OutcomeKind.PREEMPTED:
            yield f"job {live.job.id} makes room: it was asked to stop"


def _making_room(scheduler: SchedulerLoop, job: Job) -> Iterator[Reason]:
    leaving = [Reason(ReasonKind.MAKING_ROOM, text) for text in _leaving(scheduler, job)]
    yield from leaving
    head = scheduler.controller.plan.head
    if job.spec.preempts and not leaving and head is not None and head.job_id == job.id:
        yield Reason(ReasonKind.MAKING_ROOM, "no other job of lower priority can be asked to make enough room")


def story(job: Job, attempts: Sequence[Attempt], events: Sequence[Event]) -> list[dict[str, Any]]:
    """All that happened to it, in order: what its attempts tell, and what was noted besides."""
    told: list[Event] = [(job.submitted_at, "submitted", f"by {job.user}"), *events]
    for attempt in attempts:
        where = f"on {', '.join(attempt.devices)}" if attempt.devices else "without a GPU"
        if attempt.engine:
            where = f"at {attempt.place or '?'}, {attempt.engine} {attempt.site_id or ''}".rstrip()
        else:
            where = f"{where}, pid {attempt.pid}"
        if attempt.has_started:
            told.append((attempt.started_at, "started", f"attempt {attempt.number} {where}"))
        if attempt.outcome is not None and attempt.ended_at is not None:
            how = attempt.outcome.reason or f"status {attempt.outcome.status}"
            told.append((attempt.ended_at, "ended", f"attempt {attempt.number} {attempt.outcome.kind}: {how}"))
    # An attempt ends before anything follows from it, and begins after what led to it.
    rank = {"submitted": 0, "ended": 1, "started": 3}
    told.sort(key=lambda event: (event[0], rank.get(event[1], 2)))
    return [
        {"id": number, "at": iso_time(at), "kind": kind, "text": text} for number, (at, kind, text) in enumerate(told)
    ]


def _plain_reasons(scheduler: SchedulerLoop, job: Job) -> Iterator[Reason]:
    if job.state is JobState.BLOCKED:
        for other, kind, state in scheduler.store.dependencies(job.id):
            if outlook(kind, state) is DependencyOutlook.PENDING:
                until = {"ok": "to succeed", "any": "to end", "failed": "to fail"}[kind]
                yield Reason(ReasonKind.BLOCKED, f"job {other} is {state}; it has {until} first")
    elif job.state is JobState.DELAYED:
        left = max(0.0, (job.due_at or 0.0) - scheduler.sampling.now())
        yield Reason(ReasonKind.DELAYED, f"{job.reason}; {format_duration(left)} to go")
    elif job.state is JobState.HELD:
        yield Reason(ReasonKind.HELD, job.reason or f"held: `gpuyard release {job.id}` lets it go on")
    elif job.state is JobState.SUSPENDED and not _is_parked_for_room(scheduler, job):
        yield Reason(ReasonKind.SUSPENDED, f"suspended by hand: `gpuyard resume {job.id}` lets it go on")
    elif job.state is JobState.PENDING:
        yield Reason(ReasonKind.PENDING, job.reason or f"it is being handed over to {job.spec.engine}")
    elif job.state in IN_SUSPENSION and job.reason is not None:
        yield Reason(ReasonKind.SUSPENDED, job.reason)


def _how_it_waits(job: Job, *, is_about_to: bool, goes_on: bool) -> str:
    if goes_on:
        return f"job {job.id} is suspended, and {'is about to go on' if is_about_to else 'waits for room to go on'}"
    return f"job {job.id} is about to start" if is_about_to else f"job {job.id} waits for {_what(job)}"


def _how_it_is(job: Job) -> str:
    if job.state in LIVE:
        return _LIVE_WORDS.get(job.state) or f"is {job.reason or 'stopping'}"
    if job.state in FINISHED:
        return (
            f"has {job.state}"
            if job.state is JobState.SUCCEEDED
            else f"{_ENDED[job.state]}: {job.reason or 'nobody knows why'}"
        )
    return {"held": "is held", "blocked": "waits for other jobs", "delayed": "will be tried again"}[job.state]


_LIVE_WORDS = {
    JobState.PENDING: "has been handed over, and waits there",
    JobState.RUNNING: "runs",
    JobState.SUSPENDING: "is being suspended: its memory is moved to RAM",
    JobState.SUSPENDED: "is suspended",
    JobState.RESUMING: "is about to go on: its memory is moved back",
}
_ENDED = {JobState.FAILED: "failed", JobState.CANCELLED: "was cancelled", JobState.REJECTED: "was rejected"}


def _what(job: Job) -> str:
    if job.spec.engine:
        return job.spec.engine
    count = job.spec.need.devices
    return f"{count} GPU{'' if count == 1 else 's'}" if count else "a free slot"


def _estimate(starts_at: float | None, now: float, *, goes_on: bool) -> str:
    if starts_at is None:
        return "nobody knows when: say how long jobs take with --duration, or let some like it finish"
    return f"it should {'go on' if goes_on else 'start'} in about {format_duration(max(0.0, starts_at - now))}"
