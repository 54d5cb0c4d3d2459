"""What has happened since the daemon started, counted: starts, ends, waits, steps. `exposition` puts it into words.

It hears of every step, a thousand times a second where jobs are short, so it only ever adds up.
"""

from bisect import bisect_left
from collections.abc import Sequence

from gpuyard.control.step import Step
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
    """How many were up to each bound, and above the last; `total` is of their values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class EventCounters:
    """Every label is there from the beginning: a series that starts at its first event hides that event."""

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

    def note(self, step: Step, step_s: float, plan: Plan, snapshot: Snapshot) -> None:
        """After each step: what it took, what it brought, what it goes by."""
        self.step_s.add(step_s)
        for news in step.events:
            self._note_news(news)
        if plan.waiting:
            self._note_avoided(plan, snapshot)

    def _note_news(self, news: PublishedEvent) -> None:
        if news.kind is PublishedEventKind.STARTED:
            self._note_start(news)
        elif news.kind is PublishedEventKind.ENDED:
            self._note_end(news)
        else:
            self.jobs_finished[news.job.state] += 1
            self._avoided.discard(news.job.id)

    def _note_start(self, news: PublishedEvent) -> None:
        self.starts += 1
        queued_at = news.job.queued_at
        self.wait_s.add(max(0.0, news.at - (news.job.submitted_at if queued_at is None else queued_at)))

    def _note_end(self, news: PublishedEvent) -> None:
        assert news.outcome is not None
        assert news.attempt is not None
        self.attempts_ended[news.outcome.kind] += 1
        if news.attempt.has_started:
            self.run_s.add(news.attempt.ran_s(news.at))
        if news.attempt.lack is not None:
            self.out_of_memory[news.attempt.lack.shortage.where] += 1

    def _note_avoided(self, plan: Plan, snapshot: Snapshot) -> None:
        """Each job counts once, and is looked into once for each look at the machine: it may wait for many steps."""
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._examined.clear()
        for hold in plan.waiting:
            if hold.job_id in self._examined:
                continue
            self._examined.add(hold.job_id)
            if hold.job_id not in self._avoided and would_have_run_out(hold, snapshot):
                self._avoided.add(hold.job_id)
                self.out_of_memory_avoided += 1
