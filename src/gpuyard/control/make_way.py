"""Lets younger first runs make way for a job that was on their device first and ran out of memory there (ADR 62).

- The job keeps its place in the queue. The planner decides which of the first runs leave when its turn comes.
- They resume only after the job has started, or has left the queue.
- A first run makes way at most once for each time that the job ran out of memory.
"""

from collections.abc import Collection, Iterator, Sequence

from gpuyard.control.guard_memory import MemoryGuard
from gpuyard.control.live_jobs import Live
from gpuyard.control.rules import Rules
from gpuyard.control.suspend_jobs import SuspendControl
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Attempt, Growth, Job, MemoryLack, OutcomeKind
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.memory.memory_guard import fits_beside, loses_little, makes_way_for
from gpuyard.core.memory.out_of_memory import ShortageKind
from gpuyard.core.scheduling.device_memory import capacity
from gpuyard.core.scheduling.plan import Preempt
from gpuyard.core.snapshot import Sample


class MakeWay:
    def __init__(self, transitions: JobTransitions, suspend_control: SuspendControl, guard: MemoryGuard) -> None:
        self._transitions = transitions
        self._suspend_control = suspend_control
        self._guard = guard
        self._asked: set[tuple[int, int, int]] = set()  # the job, its attempt, and the first run that made way for it
        self._ran_out: tuple[int, int, Live | None] = (0, -1, None)  # a job, the version of live jobs, and its attempt

    def would_help(  # noqa: PLR0913, PLR0917 - everything that decides
        self, live: Live, lack: MemoryLack, growth: Growth | None, sample: Sample, rules: Rules, now: float
    ) -> bool:
        """Return whether a job that ran out of memory has what it needs next (`growth`) on its devices once the first
        runs that joined it later, and can leave, have left. False if there are none; those that are leaving already
        count."""
        if growth is None or lack.shortage.where is not ShortageKind.DEVICE:
            return False
        on_device, unpredicted = self._transitions.live.on_device, self._transitions.live.unpredicted
        found = False
        for device_id in live.attempt.devices:
            device, stays_mb = sample.snapshot.device(device_id), []
            for other in on_device.get(device_id, {}).values():
                is_younger = makes_way_for(other.job, other.attempt, live.job, live.attempt)
                if is_younger and other.job.id in unpredicted and self._can_leave(other, sample, rules, now):
                    found = True
                elif other.job.id != live.job.id:
                    stays_mb.append(_held_mb(other.attempt, device_id))
            size = None if device is None else capacity(device)
            if size is None or not fits_beside(growth, size, stays_mb):
                return False
        return found

    def younger(self, job_id: int, sample: Sample, rules: Rules, now: float) -> Collection[int]:
        """Return the first runs that may make way for a waiting job: those that had joined it when it ran out of
        memory. Empty if its last attempt ended otherwise, or while the sample still shows its memory."""
        first, taken_at = self._last_shortage(job_id), sample.snapshot.taken_at
        if first is None or first.attempt.over is None or (taken_at is not None and taken_at < first.attempt.over.at):
            return ()
        return {
            live.job.id
            for live in self._younger(first.job, first.attempt)
            if live.attempt.since <= first.attempt.over.at
            and (job_id, first.attempt.number, live.job.id) not in self._asked
            and not self._guard.is_spared(live.job.id, now)
            and self._can_leave(live, sample, rules, now)
        }

    def _last_shortage(self, job_id: int) -> Live | None:
        """Return the job and its last attempt if that ran out of memory. Read once until a live job changes: no job can
        end before that."""
        version = self._transitions.live.version
        if self._ran_out[:2] != (job_id, version):
            job, found = self._transitions.store.job(job_id), None
            if job is not None and job.growth.count and job.attempts:
                attempt = self._transitions.store.attempts(job_id)[-1]
                if attempt.over is not None and attempt.over.outcome.kind is OutcomeKind.OUT_OF_MEMORY:
                    found = Live(job=job, attempt=attempt)
            self._ran_out = job_id, version, found
        return self._ran_out[2]

    def _younger(self, job: Job, attempt: Attempt) -> Iterator[Live]:
        for live in self._guard.first_runs().values():
            if makes_way_for(live.job, live.attempt, job, attempt):
                yield live

    def _can_leave(self, live: Live, sample: Sample, rules: Rules, now: float) -> bool:
        is_leaving = live.job.state is not JobState.RUNNING
        return (
            is_leaving
            or self._guard.why_not_suspended(live, sample, rules) is None
            or loses_little(live.attempt.ran_s(now))
        )

    def act(self, leaving: Sequence[Preempt], sample: Sample, rules: Rules, now: float) -> None:
        """Suspend the first runs that the plan names, or stop and queue them again."""
        for each in leaving:
            first, live = self._last_shortage(each.for_job), self._transitions.live[each.job_id]
            assert first is not None
            self._asked.add((each.for_job, first.attempt.number, each.job_id))
            shared = next(device_id for device_id in live.attempt.devices if device_id in first.attempt.devices)
            device, label = sample.snapshot.device(shared), sample.snapshot.labels.get(shared, shared)
            text = f"job {each.for_job} ran out of memory on GPU {label} and was there first"
            is_short = loses_little(live.attempt.ran_s(now))
            if device is not None:
                self._guard.leave(live, device, text, sample, rules, now, may_be_stopped=is_short)
            if self._transitions.live[each.job_id].job.state is JobState.SUSPENDING:
                self._suspend_control.made_way[each.job_id] = each.for_job
        self._asked = {key for key in self._asked if key[2] in self._transitions.live}

    def leaving_for(self, job_id: int) -> Iterator[Live]:
        """Yield the jobs that are being suspended for a job that was on their device first."""
        for each, first in self._suspend_control.made_way.items():
            live = self._transitions.live.get(each)
            if first == job_id and live is not None and live.job.state is JobState.SUSPENDING:
                yield live


def _held_mb(attempt: Attempt, device_id: str) -> float | None:
    """Return what a job holds or reserves on a device; None if it has the device to itself."""
    if attempt.reserved_mb is None:
        return None
    peaks = attempt.usage.peaks_mb if attempt.usage is not None else {}
    return max(attempt.reserved_mb, peaks.get(device_id, 0.0))
