"""Suspends jobs and has them go on: what was asked for is recorded first, then done, and what came of it is recorded.

- A job that is `suspending` or `resuming` is asked for again by whoever takes over: to ask twice is harmless.
- A suspended job's lease is for nothing, until the ledger has granted what it needs to go on; only then is it resumed.
- Where a job that was to make room cannot be suspended, it is stopped and queued again, unless it says never.
- One that cannot be brought back is ended, and follows the rules for retries.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from gpuyard.control.live_jobs import Live
from gpuyard.control.step import Rules
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Attempt, OnPreempt, OutcomeKind, SuspendedBy, Usage
from gpuyard.core.job.lifecycle import IN_SUSPENSION, JobEvent, JobState
from gpuyard.core.lease import Claim, FixedMemory, Lease, Need, RestOfDevice, WholeDevice
from gpuyard.core.sample import Sample
from gpuyard.core.scheduling.plan import Preempt
from gpuyard.core.scheduling.preemption import RunningJob
from gpuyard.core.scheduling.queue_order import Candidate, Lane, LaneQueue
from gpuyard.core.snapshot import Snapshot
from gpuyard.core.units import format_size
from gpuyard.ports import Suspender, SuspendResult, WantedClaim

# Measured on a current card: so many MB a second go out to RAM, and so many come back.
_OUT_MB_PER_S, _BACK_MB_PER_S = 1600.0, 5000.0
_TRY_AGAIN_S = 5.0
_PATIENCE_S, _LONGEST_PATIENCE_S = 15.0, 3600.0
_BEING_MOVED = (JobState.SUSPENDING, JobState.RESUMING)


class NoSuspender:
    """For engines that cannot."""

    def refusal(self, attempt: Attempt, snapshot: Snapshot) -> str | None:  # noqa: ARG002
        return "jobs cannot be suspended here"

    def suspend(self, attempt: Attempt) -> None: ...

    def resume(self, attempt: Attempt, needs_mb: Mapping[str, float]) -> None: ...

    def moved(self) -> list[SuspendResult]:
        return []


class SuspendControl:
    def __init__(self, transitions: JobTransitions, suspender: Suspender) -> None:
        self._transitions = transitions
        self._suspender = suspender
        self._asked: set[tuple[int, JobState]] = set()
        self._granted: set[int] = set()
        self._unrecorded: list[SuspendResult] = []
        self._not_before: dict[int, float] = {}
        self._asked_for: dict[int, tuple[int, float]] = {}
        self._refused: dict[tuple[int, int], str] = {}

    # What came of it

    def listen(self) -> None:
        if not self._unrecorded:
            self._unrecorded = self._suspender.moved()

    def forget_recorded(self) -> None:
        self._unrecorded = []

    def record(self, now: float) -> bool:
        """Whether anybody has left a device."""
        has_left = False
        for moved in self._unrecorded:
            self._asked -= {(moved.job_id, state) for state in _BEING_MOVED}
            self._granted.discard(moved.job_id)
            live = self._transitions.live.get(moved.job_id)
            if live is None or live.attempt.number != moved.attempt or live.attempt.stopping is not None:
                continue
            if moved.is_ruined:
                self._transitions.store.add_event(moved.job_id, now, "not-restored", moved.text)
                self._transitions.stop(moved.job_id, OutcomeKind.NOT_RESTORED, now)
            elif moved.is_resumed and live.job.state is JobState.RESUMING:
                self._record_resumption(live, moved, now)
            elif not moved.is_resumed and live.job.state is JobState.SUSPENDING:
                self._record_suspension(live, moved, now)
                has_left = has_left or moved.is_done
        return has_left

    def _record_suspension(self, live: Live, moved: SuspendResult, now: float) -> None:
        job, attempt = live.job, live.attempt
        if moved.is_done:
            self._transitions.note_usage(job.id, _weighed(attempt.usage or Usage(), moved.held_mb))
            self._transitions.move(
                job.id, JobEvent.MOVED_OUT, now, _suspended_text(self._transitions.live[job.id], moved)
            )
            return
        self._refused[job.id, attempt.number] = moved.text
        self._transitions.move(job.id, JobEvent.CONTINUE, now, f"it could not be suspended: {moved.text}")

    def _record_resumption(self, live: Live, moved: SuspendResult, now: float) -> None:
        if moved.is_done:
            took = f" in {moved.seconds:.1f} s" if moved.seconds is not None else ""
            self._transitions.move(live.job.id, JobEvent.CONTINUE, now, f"its memory is back{took}")
            return
        self._not_before[live.job.id] = now + _TRY_AGAIN_S
        self._transitions.move(live.job.id, JobEvent.MOVED_OUT, now, f"it could not be resumed yet: {moved.text}")

    # What is asked for

    def ask(self) -> None:
        """Once it is recorded; after a crash of ours, again. Nobody is resumed whose lease is not known to be for what
        it needs."""
        wanted = {
            (job_id, live.job.state): live
            for job_id, live in self._transitions.live.apart.items()
            if live.job.state in _BEING_MOVED
        }
        self._asked &= wanted.keys()
        for key, live in wanted.items():
            if key in self._asked or (live.job.state is JobState.RESUMING and key[0] not in self._granted):
                continue
            self._asked.add(key)
            if live.job.state is JobState.SUSPENDING:
                self._suspender.suspend(live.attempt)
            else:
                self._suspender.resume(live.attempt, _held_mb(live.attempt))

    def refusal(self, live: Live, sample: Sample, rules: Rules) -> str | None:
        """Why it cannot be suspended now. What others hold that are on their way out is promised to them."""
        if not live.attempt.devices:
            return "it has no GPU whose memory could be freed"
        available = sample.snapshot.host.memory_available_mb
        leaving = [each for each in self._transitions.live.apart.values() if each.job.state is JobState.SUSPENDING]
        needed = sum(sum(_held_mb(each.attempt).values()) for each in (live, *leaving)) + rules.ram_reserve_mb
        if available is not None and available < needed:
            return f"{format_size(available)} of RAM are available, and {format_size(needed)} would be needed"
        return self._suspender.refusal(live.attempt, sample.snapshot)

    # Making room

    def _why_not(self, live: Live, sample: Sample, rules: Rules) -> str | None:
        """What was tried once and could not be is not tried again, unless a person asks for it."""
        tried = self._refused.get((live.job.id, live.attempt.number))
        return tried if tried is not None else self.refusal(live, sample, rules)

    def priced(self, running: Iterable[RunningJob], sample: Sample, rules: Rules, now: float) -> Iterator[RunningJob]:
        """With what it costs to have each make room."""
        for run in running:
            live = self._transitions.live[run.job_id]
            may_be = live.job.state is JobState.RUNNING and live.job.spec.on_preempt is not OnPreempt.NEVER
            yield replace(run, preempt_cost_s=self._cost_s(live, sample, rules, now)) if may_be else run

    def _cost_s(self, live: Live, sample: Sample, rules: Rules, now: float) -> float:
        if live.job.spec.on_preempt is OnPreempt.SUSPEND and self._why_not(live, sample, rules) is None:
            held = sum(_held_mb(live.attempt).values())
            return held / _OUT_MB_PER_S + held / _BACK_MB_PER_S
        return live.attempt.ran_s(now)  # what it has done so far is done again

    def make_room(self, preempts: Sequence[Preempt], sample: Sample, rules: Rules, now: float) -> None:
        if not preempts or not self._may_ask(preempts, now):
            return
        for preempt in preempts:
            live = self._transitions.live[preempt.job_id]
            is_asked_to_stop = live.job.spec.on_preempt is OnPreempt.REQUEUE
            why_not = None if is_asked_to_stop else self._why_not(live, sample, rules)
            if is_asked_to_stop or why_not is not None:
                note = f"for job {preempt.for_job}" + (f"; it cannot be suspended: {why_not}" if why_not else "")
                self._transitions.store.add_event(preempt.job_id, now, "preempted", note)
                self._transitions.stop(preempt.job_id, OutcomeKind.PREEMPTED, now)
            else:
                self._transitions.park(
                    preempt.job_id, SuspendedBy.FOR_ROOM, now, f"it makes room for job {preempt.for_job}"
                )

    def _may_ask(self, preempts: Sequence[Preempt], now: float) -> bool:
        """Where those who left did not help, others are not asked at once: something else is in its way. Those who
        could not be suspended when they were asked are not others."""
        for_job = preempts[0].for_job
        times, not_before = self._asked_for.get(for_job, (0, 0.0))
        live = (self._transitions.live[each.job_id].attempt for each in preempts)
        if now < not_before and not any((each.job_id, each.number) in self._refused for each in live):
            return False
        self._asked_for = {for_job: (times + 1, now + min(_LONGEST_PATIENCE_S, _PATIENCE_S * float(2**times)))}
        return True

    # Going on

    def queues(self, now: float) -> Iterator[LaneQueue]:
        """Those that wait for room to go on, each as a lane of its own."""
        for job_id, live in self._transitions.live.apart.items():
            if not self._waits_for_room(live) or now < self._not_before.get(job_id, 0.0):
                continue
            job = live.job
            lane = Lane(
                id=-job_id, priority=job.priority, user=job.user, tag=job.spec.tag, need=resume_need(live), resumes=True
            )
            # While it ran it did not wait: it must not go before the one that it made room for.
            since = live.attempt.suspended_at or job.submitted_at
            yield LaneQueue(lane=lane, jobs=iter([Candidate(job_id=job_id, queued_at=since)]))

    def wake_at(self, now: float) -> float | None:
        live = self._transitions.live
        self._not_before = {job_id: at for job_id, at in self._not_before.items() if job_id in live and at > now}
        self._refused = {key: text for key, text in self._refused.items() if key[0] in live}
        return min(self._not_before.values(), default=None)

    def resume(self, job_id: int, claim: Claim, now: float) -> None:
        """The ledger has granted what it needs."""
        self._granted.add(job_id)
        self._transitions.set_reserved(job_id, claim)
        self._transitions.move(job_id, JobEvent.RESUME, now, "there is room for it again")

    def parks(self, leases: Sequence[Lease], now: float) -> list[WantedClaim]:
        """Leases of suspended jobs that are still for something.

        A crash may have come between what the ledger says and what is recorded. One whose lease is for nothing is
        suspended: its lease was given up when its memory had left, or had not come back.
        """
        live = {lease.id for lease in leases}
        parked = [each for each in self._transitions.live.apart.values() if each.job.state in IN_SUSPENSION]
        for each in parked:
            if each.attempt.lease_id in live:
                self._granted |= {each.job.id} if each.job.state is JobState.RESUMING else set()
            elif each.job.state is not JobState.SUSPENDED:
                self._transitions.move(each.job.id, JobEvent.MOVED_OUT, now, "it was suspended when the daemon ended")
        return [
            WantedClaim(claim=Claim(shares=()), amends=each.attempt.lease_id)
            for each in parked
            if each.job.state is JobState.SUSPENDED and each.attempt.lease_id in live
        ]

    @property
    def has_parked(self) -> bool:
        return any(live.job.state in IN_SUSPENSION for live in self._transitions.live.apart.values())

    @property
    def has_waiting(self) -> bool:
        """Whether any waits to go on."""
        return any(self._waits_for_room(live) for live in self._transitions.live.apart.values())

    def _waits_for_room(self, live: Live) -> bool:
        return live.job.state is JobState.SUSPENDED and live.attempt.parked is SuspendedBy.FOR_ROOM


def resume_need(live: Live) -> Need:
    """On the devices it had, alone where it was; what it holds has to be free there, or the driver could never bring it
    back. Of one that was never measured nobody knows how much that is."""
    job, attempt = live.job, live.attempt
    was_alone = attempt.reserved_mb is None or isinstance(job.spec.need.memory, WholeDevice)
    # A first run reserved all that was free, which may never be free again.
    took_rest = job.spec.learns_memory and attempt.predicted_mb is None and attempt.usage is not None
    held = max((*_held_mb(attempt).values(), 0.0 if took_rest else attempt.reserved_mb or 0.0))
    shared = RestOfDevice(held) if took_rest else FixedMemory(held)
    memory = WholeDevice(held or None) if was_alone else shared
    return Need(devices=len(attempt.devices), memory=memory, only=attempt.devices)


def _held_mb(attempt: Attempt) -> dict[str, float]:
    """What has to be free on each device to bring it back: the most it was seen to hold there."""
    usage = attempt.usage or Usage()
    return {device_id: usage.peaks_mb.get(device_id, attempt.reserved_mb or 0.0) for device_id in attempt.devices}


def _weighed(usage: Usage, held_mb: Mapping[str, float]) -> Usage:
    """It may have taken more since it was last looked at."""
    return replace(
        usage,
        peaks_mb={
            **usage.peaks_mb,
            **{device_id: max(held, usage.peaks_mb.get(device_id, 0.0)) for device_id, held in held_mb.items() if held},
        },
    )


def _suspended_text(live: Live, moved: SuspendResult) -> str:
    held = sum(_held_mb(live.attempt).values())
    took = f" in {moved.seconds:.1f} s" if moved.seconds is not None else ""
    until = (
        f"until `gpuyard resume {live.job.id}`"
        if live.attempt.parked is SuspendedBy.BY_PERSON
        else "it goes on when there is room"
    )
    return f"{format_size(held)} moved to RAM{took}; {until}"
