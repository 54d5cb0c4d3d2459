"""Suspends and resumes jobs: a request is recorded first, then carried out, and then its result is recorded.

- A new daemon repeats the request for each job that is `suspending` or `resuming`: asking twice is harmless.
- The lease of a suspended job reserves RAM, and no device. It is resumed only after the ledger has granted its devices.
- A preempted job that cannot be suspended is stopped and queued again, unless its `on_preempt` is `never`.
- A job whose memory cannot be restored is ended, and follows the rules for retries.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gpuyard.model.job import Attempt, OutcomeKind, SuspendedBy, Usage
from gpuyard.model.job_spec import OnPreempt
from gpuyard.model.lease import Claim, FixedMemory, Lease, MemoryNeed, Need, Share, UncertainMemory, WholeDevice
from gpuyard.model.lifecycle import IN_SUSPENSION, JobEvent, JobState
from gpuyard.model.machine_snapshot import Sample, Snapshot
from gpuyard.model.units import format_size
from gpuyard.policy.memory_guards import room_to_resume
from gpuyard.policy.preempt import MoveRates, learn_move, learn_together
from gpuyard.policy.queue_order import Candidate, Lane, LaneQueue
from gpuyard.policy.world import Preempt, RunningJob
from gpuyard.ports import LeaseLedger, Suspender, SuspendResult, WantedClaim
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.transitions import JobTransitions
from gpuyard.store.job_store import JobStore

_SETTING = "move_rates"


class LearnedRates:
    """How fast this machine suspends and resumes, kept in the queue's database. A figure counts for one program only if
    no other was moved at the same time; those of programs that left within 2 s of each other count together."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._moving: set[tuple[int, bool]] = set()  # jobs, and whether they are being resumed
        self._was_shared = self._is_spoilt = False  # since the first of those that are moving began
        self._began_at = 0.0
        self._out_mb = 0.0  # by the driver, since then

    @property
    def rates(self) -> MoveRates:
        """The rates as they are stored, or the defaults; those of another version of gpuyard are forgotten."""
        try:
            return msgspec.json.decode(self._store.setting(_SETTING) or "{}", type=MoveRates)
        except msgspec.MsgspecError:
            return MoveRates()

    def begin(self, job_id: int, now: float, *, is_resumed: bool) -> None:
        if not self._moving:
            self._began_at, self._out_mb, self._was_shared, self._is_spoilt = now, 0.0, False, False
        self._moving.add((job_id, is_resumed))
        self._was_shared = self._was_shared or len(self._moving) > 1
        self._is_spoilt = self._is_spoilt or is_resumed or now > self._began_at + 2.0

    def fail(self, job_id: int, *, is_resumed: bool) -> None:
        """Note a move that failed: it says nothing about rates, nor do those beside it."""
        self._moving.discard((job_id, is_resumed))
        self._was_shared = self._is_spoilt = True

    def end(  # noqa: PLR0913 - what is known of a move
        self, job_id: int, memory_mb: float, seconds: float | None, now: float, *, is_resumed: bool, is_parked: bool
    ) -> None:
        """Learn from a move that is over. Call it in a transaction."""
        if (job_id, is_resumed) not in self._moving or seconds is None:
            return
        self._moving.discard((job_id, is_resumed))
        rates = before = self.rates
        if not self._was_shared:
            rates = learn_move(rates, memory_mb, seconds, is_resumed=is_resumed, is_parked=is_parked)
        else:
            self._out_mb += memory_mb if not (is_resumed or is_parked) else 0.0
            if not (self._moving or self._is_spoilt):
                rates = learn_together(rates, self._out_mb, now - self._began_at)
        if rates != before:
            self._store.set_setting(_SETTING, msgspec.json.encode(rates).decode())


_MOVING = (JobState.SUSPENDING, JobState.RESUMING)


class SuspendControl:
    def __init__(self, transitions: JobTransitions, suspender: Suspender) -> None:
        self._transitions, self._suspender = transitions, suspender
        self.learned_rates = LearnedRates(transitions.store)
        self._was_parked: dict[int, bool] = {}  # whether the memory of a suspended job was moved by its program
        self._requested: set[tuple[int, JobState]] = set()
        self._granted: set[int] = set()
        self._unrecorded: list[SuspendResult] = []
        self._not_before: dict[int, float] = {}
        self._preempted_for: dict[int, tuple[int, float]] = {}
        self._refused: dict[tuple[int, int], str] = {}
        self._left_mb: dict[int, dict[str, float]] = {}  # what suspended jobs still hold, by device

    def collect(self) -> None:
        if not self._unrecorded:
            self._unrecorded = self._suspender.moved()

    def forget_recorded(self) -> None:
        self._unrecorded = []

    def record(self, now: float) -> bool:
        """Record the results; return whether a job has freed device memory."""
        has_freed = False
        for moved in self._unrecorded:
            self._requested -= {(moved.job_id, state) for state in _MOVING}
            self._granted.discard(moved.job_id)
            live = self._transitions.live.get(moved.job_id)
            if live is None or live.attempt.number != moved.attempt or live.attempt.stopping is not None:
                self.learned_rates.fail(moved.job_id, is_resumed=moved.is_resumed)
                continue
            self._learn_rates(live, moved, now)
            if moved.is_ruined:
                self._transitions.store.add_event(moved.job_id, now, "not-restored", moved.text)
                self._transitions.stop(moved.job_id, OutcomeKind.NOT_RESTORED, now)
            elif moved.is_resumed and live.job.state is JobState.RESUMING:
                event, text = JobEvent.CONTINUE, f"memory restored{_took(moved)}"
                if not moved.is_done:
                    self._not_before[live.job.id] = now + 5.0
                    event, text = JobEvent.MOVED_OUT, f"could not be resumed yet: {moved.text}"
                self._transitions.move_suspension(live.job.id, event, now, text)
            elif not moved.is_resumed and live.job.state is JobState.SUSPENDING:
                self._record_suspension(live, moved, now)
                has_freed = has_freed or moved.is_done
        return has_freed

    def _learn_rates(self, live: Live, moved: SuspendResult, now: float) -> None:
        job_id, is_parked = live.job.id, moved.parked_mb is not None
        if moved.is_resumed:
            was_parked = self._was_parked.pop(job_id, None)
            is_known, is_parked = was_parked is not None, bool(was_parked)
        else:
            self._was_parked[job_id], is_known = is_parked, True
        if not (moved.is_done and is_known):
            self.learned_rates.fail(job_id, is_resumed=moved.is_resumed)
            return
        memory_mb = sum(moved.held_mb.values()) or sum(_held_mb(live.attempt).values())
        self.learned_rates.end(job_id, memory_mb, moved.seconds, now, is_resumed=moved.is_resumed, is_parked=is_parked)

    def _record_suspension(self, live: Live, moved: SuspendResult, now: float) -> None:
        job_id, attempt = live.job.id, live.attempt
        if not moved.is_done:
            if not moved.may_pass:  # else a victim would be stopped, and lose its work, for a limit that passes
                self._refused[job_id, attempt.number] = moved.text
            text = f"could not be suspended: {moved.text}"
            self._transitions.move_suspension(job_id, JobEvent.CONTINUE, now, text)
            return
        usage = attempt.usage or Usage()  # it may have held more than in the last sample
        held = {each: max(mb, usage.peaks_mb.get(each, 0.0)) for each, mb in moved.held_mb.items() if mb}
        self._transitions.note_usage(job_id, replace(usage, peaks_mb={**usage.peaks_mb, **held}))
        live = self._transitions.live[job_id]
        held_mb, is_by_person = _held_mb(live.attempt), attempt.parked is SuspendedBy.BY_PERSON
        until = f"until `gpuyard resume {job_id}`" if is_by_person else "resumes when enough memory is free"
        by_program = "" if moved.parked_mb is None else " by the program itself"
        not_parked = f"; the program did not park it: {moved.text}" if moved.text else ""
        text = f"{format_size(sum(held_mb.values()))} moved to RAM{by_program}{_took(moved)}{not_parked}; {until}"
        if attempt.parked is SuspendedBy.MEMORY_GUARD:  # it resumes only where clearly more than it held is free
            room = room_to_resume(max(held_mb.values(), default=0.0), live.attempt.reserved_mb or 0.0)
            self._transitions.keep_attempt(live, replace(live.attempt, reserved_mb=room))
            text = f"{live.job.reason}; {text}" if live.job.reason else text
        self._transitions.move_suspension(job_id, JobEvent.MOVED_OUT, now, text)

    def request(self) -> None:
        """Ask the suspender for what is recorded; for a resumption only once the lease reserves what it needs."""
        moving = [live for live in self._transitions.live.apart.values() if live.job.state in _MOVING]
        wanted = {(live.job.id, live.job.state): live for live in moving}
        self._requested &= wanted.keys()
        for key, live in wanted.items():
            if key in self._requested or (live.job.state is JobState.RESUMING and key[0] not in self._granted):
                continue
            self._requested.add(key)
            is_resumed, since = live.job.state is JobState.RESUMING, live.attempt.suspended_at or 0.0
            self.learned_rates.begin(live.job.id, since, is_resumed=is_resumed)
            if live.job.state is JobState.SUSPENDING:
                self._suspender.suspend(live.attempt)
            else:
                self._suspender.resume(live.attempt, _held_mb(live.attempt))

    def refusal(self, live: Live, sample: Sample, rules: Rules) -> str | None:
        """Return why the job cannot be suspended now, or None. RAM that suspending jobs will need is taken."""
        if not live.attempt.devices:
            return "it holds no GPU memory"
        available = sample.snapshot.host.memory_available_mb
        leaving = [each for each in self._transitions.live.apart.values() if each.job.state is JobState.SUSPENDING]
        moved = [each for each in (live, *leaving) if not self._suspender.can_park(each.attempt)]
        needed = sum(sum(_held_mb(each.attempt).values()) for each in moved) + rules.ram_reserve_mb
        if moved and available is not None and available < needed:
            return f"{format_size(available)} of RAM are available, {format_size(needed)} needed"
        return self._suspender.refusal(live.attempt, sample.snapshot)

    def why_not(self, live: Live, sample: Sample, rules: Rules) -> str | None:
        """Return why the job cannot be suspended. A failed try is not repeated, unless a person asks for it."""
        tried = self._refused.get((live.job.id, live.attempt.number))
        return tried if tried is not None else self.refusal(live, sample, rules)

    def with_costs(
        self, running: Iterable[RunningJob], sample: Sample, rules: Rules, now: float
    ) -> Iterator[RunningJob]:
        """Yield the running jobs with what it costs to preempt each."""
        for run in running:
            live = self._transitions.live[run.job_id]
            on_preempt, warning = live.job.spec.on_preempt, live.job.spec.warning
            if live.job.state is not JobState.RUNNING or on_preempt is OnPreempt.NEVER:
                yield run
            elif on_preempt is OnPreempt.SUSPEND and self.why_not(live, sample, rules) is None:
                rates, (held_mb, parks) = self.learned_rates.rates, self._move(live)
                out_s, shares_s = rates.out_s(held_mb, is_parked=parks), held_mb / rates.together_mb_s
                cost_s = out_s + rates.back_s(held_mb, is_parked=parks)
                yield replace(run, preempt_cost_s=cost_s, frees_in_s=out_s, shares_s=0.0 if parks else shares_s)
            else:  # it starts again; a program that is asked to stop usually has ended after a second
                leaves_s = 1.0 + (warning.lead_s if warning is not None else 0.0)
                yield replace(run, preempt_cost_s=live.attempt.ran_s(now), frees_in_s=leaves_s)

    def _move(self, live: Live) -> tuple[float, bool]:
        """Return how much memory has to leave the devices, and whether the program moves it itself."""
        return sum(_held_mb(live.attempt).values()), self._suspender.can_park(live.attempt)

    def frees_memory_at(self, job_ids: Collection[int]) -> float | None:
        """Return when these jobs should have moved their memory out; None if one of them is not being suspended."""
        lives = [self._transitions.live[each] for each in job_ids if each in self._transitions.live]
        if not lives or any(each.job.state is not JobState.SUSPENDING for each in lives):
            return None
        began_at = max(each.attempt.suspended_at or 0.0 for each in lives)
        return began_at + self.learned_rates.rates.all_out_s([self._move(each) for each in lives])

    def preempt(self, preempts: Sequence[Preempt], sample: Sample, rules: Rules, now: float) -> None:
        """Suspend the victims, or stop and queue them again if they cannot be suspended. If the first victims for a job
        did not help, wait twice as long each time; those that could not be suspended may be preempted at once."""
        if not preempts:
            return
        for_job, lives = preempts[0].for_job, [self._transitions.live[each.job_id] for each in preempts]
        times, not_before = self._preempted_for.get(for_job, (0, 0.0))
        if now < not_before and not any((each.job.id, each.attempt.number) in self._refused for each in lives):
            return
        self._preempted_for = {for_job: (times + 1, now + min(3600.0, 15.0 * float(2**times)))}
        for preempt, live in zip(preempts, lives, strict=True):
            is_stopped = live.job.spec.on_preempt is OnPreempt.REQUEUE
            why_not = None if is_stopped else self.why_not(live, sample, rules)
            if is_stopped or why_not is not None:
                note = f"for job {preempt.for_job}" + (f"; cannot be suspended: {why_not}" if why_not else "")
                self._transitions.store.add_event(preempt.job_id, now, "preempted", note)
                self._transitions.stop(preempt.job_id, OutcomeKind.PREEMPTED, now)
            else:
                text = f"preempted by job {preempt.for_job}"
                self._transitions.suspend(preempt.job_id, SuspendedBy.FOR_ROOM, now, text)

    def measure_left(self, ledger: LeaseLedger, leases: Sequence[Lease], snapshot: Snapshot) -> None:
        """Measure what the processes of jobs that wait to resume still hold on their devices, such as contexts that no
        driver could move: that need not be free, though it is in use and belongs to no share."""
        lives = filter(_waits_for_memory, self._transitions.live.apart.values())
        waiting = {live.attempt.lease_id: live for live in lives}
        self._left_mb = {}
        if not waiting:
            return
        as_running = tuple(
            replace(lease, shares=tuple(Share(device_id=each) for each in waiting[lease.id].attempt.devices))
            if lease.id in waiting
            else lease
            for lease in leases
        )
        for (lease_id, device_id), left_mb in ledger.measure(snapshot, as_running).items():
            if lease_id in waiting and left_mb:
                self._left_mb.setdefault(waiting[lease_id].job.id, {})[device_id] = left_mb

    def with_left(self, job_id: int, claim: Claim) -> Claim:
        """Return the claim of a job that resumes, with what it holds already."""
        left_mb = self._left_mb.get(job_id, {})
        shares = (
            replace(each, memory_mb=each.memory_mb + left_mb.get(each.device_id, 0.0))
            if each.memory_mb is not None
            else each
            for each in claim.shares
        )
        return replace(claim, shares=tuple(shares))

    def queues(self, now: float) -> Iterator[LaneQueue]:
        """Yield the jobs that wait for free memory to resume, each as a lane of its own."""
        for job_id, live in self._transitions.live.apart.items():
            if not _waits_for_memory(live) or now < self._not_before.get(job_id, 0.0):
                continue
            job, need = live.job, resume_need(live, self._left_mb.get(job_id, {}))
            lane = Lane(id=-job_id, priority=job.priority, user=job.user, tag=job.spec.tag, need=need, resumes=True)
            # It did not wait while it ran: it must not come before the job that preempted it. The memory guard
            # suspends a job for no other one: it keeps its place.
            is_guarded = live.attempt.parked is SuspendedBy.MEMORY_GUARD
            since = job.submitted_at if is_guarded else live.attempt.suspended_at or job.submitted_at
            yield LaneQueue(lane=lane, jobs=iter([Candidate(job_id=job_id, queued_at=since)]))

    def wake_at(self, now: float) -> float | None:
        live = self._transitions.live
        self._not_before = {job_id: at for job_id, at in self._not_before.items() if job_id in live and at > now}
        self._refused = {key: text for key, text in self._refused.items() if key[0] in live}
        return min(self._not_before.values(), default=None)

    def resume(self, job_id: int, claim: Claim, now: float) -> None:
        """Record that the ledger has granted what the job needs to resume."""
        self._granted.add(job_id)
        self._transitions.set_reserved(job_id, self.with_left(job_id, claim))
        self._transitions.move_suspension(job_id, JobEvent.RESUME, now, "enough memory is free again")

    def release_leases(self, leases: Sequence[Lease], now: float) -> list[WantedClaim]:
        """Return amendments for leases of suspended jobs that still reserve something. A job whose lease has no shares
        is suspended, whatever is recorded: a daemon may have died between a change of the ledger and its record."""
        live = {lease.id for lease in leases if lease.shares}
        paused = [each for each in self._transitions.live.apart.values() if each.job.state in IN_SUSPENSION]
        for each in paused:
            if each.attempt.lease_id in live:
                self._granted |= {each.job.id} if each.job.state is JobState.RESUMING else set()
            elif each.job.state is not JobState.SUSPENDED:
                text = "suspended when the daemon ended"
                self._transitions.move_suspension(each.job.id, JobEvent.MOVED_OUT, now, text)
        return [
            WantedClaim(claim=Claim(shares=()), amends=each.attempt.lease_id)
            for each in paused
            if each.job.state is JobState.SUSPENDED and each.attempt.lease_id in live
        ]

    @property
    def has_suspended(self) -> bool:
        return any(live.job.state in IN_SUSPENSION for live in self._transitions.live.apart.values())

    @property
    def has_waiting(self) -> bool:
        """Whether a job waits for free memory to resume."""
        return any(map(_waits_for_memory, self._transitions.live.apart.values()))


def _waits_for_memory(live: Live) -> bool:
    is_left_to_others = live.attempt.parked in (SuspendedBy.BY_PERSON, SuspendedBy.BY_SITE)
    return live.job.state is JobState.SUSPENDED and not is_left_to_others


def resume_need(live: Live, left_mb: Mapping[str, float]) -> Need:
    """Return the need of a suspended job: its former devices, alone if it was alone, and on each what it held there
    (ADR 73), less what it still holds (`left_mb`). The driver can restore its memory only if that much is free; for a
    job that was never measured, the amount is unknown."""
    job, attempt = live.job, live.attempt
    was_alone = attempt.reserved_mb is None or isinstance(job.spec.need.memory, WholeDevice)
    # What is expected of a job without an estimate may be more than any device has: alone it needs what it held.
    # So does a job of the memory guard: it outgrew its estimate, or was expected to.
    is_first_run = job.spec.learns_memory and attempt.predicted_mb is None and attempt.usage is not None
    is_uncertain = is_first_run or attempt.parked is SuspendedBy.MEMORY_GUARD
    reserved, held_mb = attempt.reserved_mb or 0.0, _held_mb(attempt)
    is_measured = any(held_mb.values())

    def memory_on(held: float, left: float) -> MemoryNeed:
        held = max(0.0, (held if is_uncertain else max(held, reserved)) - left)
        if was_alone:
            return WholeDevice(held if is_measured else None)
        expected = max(held, reserved - left)
        return UncertainMemory(held, expected, expected * 0.25) if is_uncertain else FixedMemory(held)  # it may grow

    needed = {each: memory_on(held, left_mb.get(each, 0.0)) for each, held in held_mb.items()}
    least = min(needed.values(), key=lambda memory: memory.required_mb or 0.0)
    on_each = tuple(needed.items()) if len(set(needed.values())) > 1 else ()
    return Need(devices=len(needed), memory=least, only=attempt.devices, is_resumed=True, memory_on=on_each)


def _held_mb(attempt: Attempt) -> dict[str, float]:
    """Return the memory that has to be free on each device to resume: the measured peak, or what was reserved."""
    usage = attempt.usage or Usage()
    return {device_id: usage.peaks_mb.get(device_id, attempt.reserved_mb or 0.0) for device_id in attempt.devices}


def _took(moved: SuspendResult) -> str:
    return f" in {moved.seconds:.1f} s" if moved.seconds is not None else ""
