"""Count the events since the daemon started: starts, ends, waits, steps. `prometheus_text` writes them.

The counters are called after every step, up to a thousand times a second with short jobs, so they only add.
"""

from bisect import bisect_left
from collections.abc import Sequence

from gpuyard.control.controller import Step
from gpuyard.core.job.job import OutcomeKind
from gpuyard.core.job.lifecycle import FINISHED, JobState
from gpuyard.core.job.published_events import PublishedEvent, PublishedEventKind
from gpuyard.core.memory.oom_avoided import would_have_run_out
from gpuyard.core.memory.out_of_memory import ShortageKind
from gpuyard.core.scheduling.plan import Plan
from gpuyard.core.snapshot import Snapshot

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
_LONG_S = (
    0.1, 0.3, 1.0, 3.0, 10.0, 30.0, _MINUTE, 3 * _MINUTE, 10 * _MINUTE, 30 * _MINUTE,
    _HOUR, 3 * _HOUR, 8 * _HOUR, _DAY, 3 * _DAY, 7 * _DAY,
)  # fmt: skip
_SHORT_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Histogram:
    """Counts per bucket: values up to each bound, then those above the last one. `total` is the sum of all values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class EventCounters:
    """Every label starts at zero: Prometheus would miss the first event of a series that appears with it."""

    def __init__(self) -> None:
        self.starts = 0
        self.attempts_ended: dict[OutcomeKind, int] = {
            kind: 0 for kind in OutcomeKind if kind is not OutcomeKind.NEVER_STARTED
        }
        self.jobs_finished = {state: 0 for state in JobState if state in FINISHED}
        self.out_of_memory = dict.fromkeys(ShortageKind, 0)
        self.out_of_memory_avoided = 0
        self.wait_s = Histogram(_LONG_S)
        self.run_s = Histogram(_LONG_S)
        self.step_s = Histogram(_SHORT_S)
        self._avoided: set[int] = set()
        self._snapshot: Snapshot | None = None
        self._examined: set[int] = set()

    def count(self, step: Step, step_s: float, plan: Plan, snapshot: Snapshot) -> None:
        """Count the events of a step that took `step_s`, and the jobs that its plan keeps waiting."""
        self.step_s.add(step_s)
        for event in step.events:
            if event.kind is PublishedEventKind.STARTED:
                self._count_start(event)
            elif event.kind is PublishedEventKind.ENDED:
                self._count_end(event)
            else:
                self.jobs_finished[event.job.state] += 1
                self._avoided.discard(event.job.id)
        if plan.waiting:
            self._count_avoided(plan, snapshot)

    def _count_start(self, event: PublishedEvent) -> None:
        self.starts += 1
        queued_at = event.job.queued_at
        self.wait_s.add(max(0.0, event.at - (event.job.submitted_at if queued_at is None else queued_at)))

    def _count_end(self, event: PublishedEvent) -> None:
        assert event.outcome is not None
        assert event.attempt is not None
        self.attempts_ended[event.outcome.kind] += 1
        if event.attempt.has_started:
            self.run_s.add(event.attempt.ran_s(event.at))
        if event.attempt.lack is not None:
            self.out_of_memory[event.attempt.lack.shortage.where] += 1

    def _count_avoided(self, plan: Plan, snapshot: Snapshot) -> None:
        """Count each job once. A job waits for many steps, so it is examined once per snapshot."""
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._examined.clear()
        for waiting in plan.waiting:
            if waiting.job_id in self._examined:
                continue
            self._examined.add(waiting.job_id)
            if waiting.job_id not in self._avoided and would_have_run_out(waiting, snapshot):
                self._avoided.add(waiting.job_id)
                self.out_of_memory_avoided += 1
