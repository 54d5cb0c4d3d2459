"""When a job of each staggered array last started. Everything kept here can be read from the store again."""

from collections.abc import Iterable, Iterator

from gpuyard.core.job.job import Job
from gpuyard.core.scheduling.queue_order import Lane
from gpuyard.store.job_store import JobStore


class ArrayStarts:
    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._last: dict[int, float | None] = {}

    def clear(self) -> None:
        self._last.clear()

    def note(self, job: Job, at: float) -> None:
        if job.spec.stagger_s and job.group is not None:
            self._last[job.group] = at

    def last_starts(self, lanes: Iterable[Lane]) -> dict[int, float]:
        """Return the last start of each staggered array among these lanes that has started."""
        found = {
            lane.group: self._last_start(lane.group) for lane in lanes if lane.stagger_s and lane.group is not None
        }
        return {group: at for group, at in found.items() if at is not None}

    def next_starts(self, lanes: Iterable[Lane], now: float) -> Iterator[float]:
        """Yield when the next job of each staggered array may start, where that is later than now."""
        for lane in lanes:
            last = self._last_start(lane.group) if lane.stagger_s and lane.group is not None else None
            if last is not None and last <= now < last + lane.stagger_s:
                yield last + lane.stagger_s

    def _last_start(self, group: int) -> float | None:
        if group not in self._last:
            self._last[group] = self._store.last_start_in_batch(group)
        return self._last[group]
