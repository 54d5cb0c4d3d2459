"""Controller.step(): reports in, a plan, instructions out. One step is one transaction.

An attempt is recorded before its keeper gets it. A crash before the commit leaves a job that is still queued, and
leases that no process holds. After it, the attempt runs exactly once, or never started and its job is queued again.
Reports are kept in memory until they are recorded. A stop is recorded before its signal, which may be sent twice.
"""

import contextlib
from collections.abc import Iterator, Sequence

from msgspec import Struct

from gpuyard.engines.common.program_outcome import loaded_libraries
from gpuyard.model.job import PublishedEvent
from gpuyard.model.lifecycle import JobEvent
from gpuyard.model.machine_snapshot import Sample
from gpuyard.model.retry import died_with_the_machine
from gpuyard.policy.wait_reasons import NOTICED_BY_QUEUE, ReasonKind
from gpuyard.policy.world import Plan, WaitingJob
from gpuyard.ports import HeldClaim
from gpuyard.queue.attempt_ends import AttemptEnds
from gpuyard.queue.decide_starts import Starts
from gpuyard.queue.measure_usage import PreallocationWatch
from gpuyard.queue.own_leases import QueueTicket
from gpuyard.queue.step_parts import QueueParts
from gpuyard.queue.stop_signals import MachineSleep, StopSignals


class Step(Struct, frozen=True, kw_only=True):
    """The result of a step. `events` are those of this step and of user requests since the last one."""

    wake_at: float | None  # when the next step is due even if nothing happens
    waits_for_devices: bool  # a job waits for something that others hold
    waits_for_sample: bool  # only a new sample can show whether a job may start
    started: int
    waits_for_others: bool = False  # the end of another program's lease, or of a drain, may let a job start
    is_outdated: bool = False  # the sample may not show memory that was freed, so nothing was started
    needs_sample: bool = False  # the end of an attempt is recorded when a newer sample shows whether its GPU failed
    events: tuple[PublishedEvent, ...] = ()
    has_more_events: bool = False  # the next step, which follows at once, has them


def awaited(waiting: Sequence[WaitingJob]) -> tuple[bool, bool]:
    """Return whether jobs wait for a lease to end, and whether they wait for something that only a sample shows."""
    reasons = [reason for each in waiting for reason in each.reasons]
    for_lease = any(reason.is_leased for reason in reasons)
    kinds = {reason.kind for reason in reasons if not reason.is_leased}
    return for_lease, not kinds <= NOTICED_BY_QUEUE or (ReasonKind.TOO_FEW in kinds and not for_lease)


class Controller(QueueParts):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._starts = Starts(self)
        self.slices, self.explain = self._starts.slices, self._starts.explain
        self._ends = AttemptEnds(self)
        self._stop_signals = StopSignals(self.transitions, self.engines)
        self._machine_sleep = MachineSleep(self.transitions, self.me.boot_id)
        self._preallocation = PreallocationWatch(self.transitions, loaded_libraries)
        self._ticket = QueueTicket(self.leases)

    @property
    def plan(self) -> Plan:
        """The last plan for this machine."""
        return self._starts.plan

    @property
    def waiting(self) -> tuple[WaitingJob, ...]:
        """The first waiting job of each lane that the last step considered."""
        return (*self.plan.waiting, *self.cluster_dispatch.plan.waiting)

    def recover(self) -> None:
        """Take over from an earlier daemon. Call this once, before the first step."""
        now = self.clock.now()
        with self.store.transaction():
            self.store.drop_incomplete_submissions()
            self.transitions.reload()
        attempts = [each.attempt for each in (*self.transitions.live.values(), *self.transitions.upcoming.values())]
        self.engines.adopt(attempts)
        if any(died_with_the_machine(attempt, self.me.boot_id) for attempt in attempts):
            self._ends.collect(now)
            self.slices.collect()
            with self._transaction():
                self.slices.record(now)
                self._record_ends(now)
            self._ends.forget_recorded()
            self.slices.forget_recorded()

    def step(self, sample: Sample, *, is_fresh: bool = True) -> Step:
        """Run one step. With `is_fresh=False` (the sample is too old) it records what happened and starts nothing."""
        now = self.clock.now()
        self._ends.collect(now)
        self.slices.collect()
        self.cluster_dispatch.collect()
        self.suspend_control.collect()
        self.observe(sample)
        with self._transaction() as granted:
            self._record_reports(sample, now)
            self._record_what_is_due(sample, now)
            started = self._starts.start(sample, now, granted, is_fresh=is_fresh)
        for reports in (self._ends, self.slices, self.cluster_dispatch, self.suspend_control):
            reports.forget_recorded()
        self._carry_out(granted, now)
        self._ticket.update(self.plan.head, now, has_started=started > 0, others_wait=self._starts.others_wait())
        return self._result(now, started)

    def observe(self, sample: Sample) -> bool:
        """Note what live attempts use. Return whether a job has to make way: the next step takes care of that."""
        now = self.clock.now()
        self.usage_tracker.note(sample, now, self._ends.ended_before(sample))
        self.energy_meter.note(sample, self.usage_tracker.loads, self._ends.end_times(now))
        is_due = self.host_guard.note(sample, self.rules, now)
        return self.memory_guard.note(sample, self.usage_tracker.held_mb, now) or is_due

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[list[HeldClaim]]:
        """Commit the block's changes. If that fails, undo them in memory too, and release the claims in the list."""
        granted: list[HeldClaim] = []
        try:
            with self.transitions.in_step(), self.store.transaction():
                yield granted
        except BaseException:
            self.batch_gates.forget()
            self.engines.discard_prepared()
            for held in granted:
                held.release()
            raise

    def _record_reports(self, sample: Sample, now: float) -> None:
        self.slices.record(now)
        self._stop_signals.record_warnings(now, self._ends.collected())
        self._machine_sleep.record(self.clock.asleep(), now)
        if self.suspend_control.record(now):
            self._starts.note_freed_memory(now, has_ended_lease=False)
        self.cluster_dispatch.record(now)
        self._record_ends(now, sample)

    def _record_ends(self, now: float, sample: Sample | None = None) -> None:
        self.energy_meter.settle(self._ends.end_times(now))
        if self._ends.record(now, sample):
            self._starts.note_freed_memory(now, has_ended_lease=True)
        self.transitions.store_begun()

    def _record_what_is_due(self, sample: Sample, now: float) -> None:
        """Settle dependants, note statistics, queue jobs whose time has come, and let jobs stop or make way."""
        self.transitions.dependants.settle_more(now)
        self._preallocation.note(sample, now)
        self.transitions.note_statistics(now)
        for job in filter(None, map(self.store.job, self.store.due_jobs(now))):
            self.transitions.apply(job, JobEvent.DUE, now)
        self.host_guard.act(now)
        self._stop_signals.stop_overdue(now)
        self.memory_guard.act(self.rules, now)

    def _carry_out(self, granted: list[HeldClaim], now: float) -> None:
        """Do what was recorded: hand over, take back, stop, suspend and resume."""
        self.engines.start_prepared()
        for held in granted:
            held.leave()
        self.slices.take_back(now)
        self.own_leases.release_ended()
        self._stop_signals.send(now)
        self.suspend_control.request()

    def _result(self, now: float, started: int) -> Step:
        events, waiting = tuple(self.transitions.take_events()), self.plan.waiting
        sample_due = self._ends.sample_due()
        has_more = bool(self.transitions.events) or self.transitions.dependants.has_more
        times = [
            self.store.next_due(),
            self.suspend_control.wake_at(now),
            self.slices.wake_at(),
            self._ticket.wake_at(now),
            self.batch_gates.wake_at(now),
            self.cluster_dispatch.wake_at(now),
            sample_due,
            *self._stop_signals.wake_times(now),
            *self._starts.wake_times(now),
            now if has_more else None,
        ]
        waits_for_lease, waits_for_sample = awaited(waiting)
        waits_for_devices = waits_for_sample or waits_for_lease
        return Step(
            wake_at=min((at for at in times if at is not None), default=None),
            waits_for_devices=waits_for_devices,
            waits_for_sample=waits_for_sample,
            waits_for_others=waits_for_devices
            and any(
                reason.kind is ReasonKind.CLOSED or any(holder.pid != self.me.pid for holder in reason.holders)
                for each in waiting
                for reason in each.reasons
            ),
            started=started,
            is_outdated=self._starts.is_outdated,
            needs_sample=sample_due is not None,
            events=events,
            has_more_events=bool(self.transitions.events),
        )
