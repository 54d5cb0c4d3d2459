"""When jobs last started whose starts are staggered: of an array, and of a tag with sharing rules.

Everything kept here can be read from the store again.
"""

from collections.abc import Iterable, Iterator

from gpuyard.core.job.job import Job
from gpuyard.core.scheduling.queue_order import Lane
from gpuyard.store.job_store import JobStore


class StaggeredStarts:
    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._of_arrays: dict[int, float | None] = {}
        self._of_tags: dict[str, float | None] = {}

    def clear(self) -> None:
        self._of_arrays.clear()
        self._of_tags.clear()

    def note(self, job: Job, at: float) -> None:
        if job.spec.tag_sharing is not None:
            self._of_tags[job.spec.tag] = at
        if job.spec.stagger_s and job.group is not None:
            self._of_arrays[job.group] = at

    def of_arrays(self, lanes: Iterable[Lane]) -> dict[int, float]:
        """Return the last start of each staggered array among these lanes that has started."""
        found = {lane.group: self._of_array(lane.group) for lane in lanes if lane.stagger_s and lane.group is not None}
        return {group: at for group, at in found.items() if at is not None}

    def of_tags(self, lanes: Iterable[Lane]) -> dict[str, float]:
        """Return the last starts of the tags with sharing rules among these lanes."""
        found = ((lane.tag, self._of_tag(lane.tag)) for lane in lanes if lane.tag_sharing is not None)
        return {tag: at for tag, at in found if at is not None}

    def next_starts(self, lanes: Iterable[Lane], now: float) -> Iterator[float]:
        """Yield when the next job of each staggered array and tag may start, where that is later than now."""
        for lane in lanes:
            if lane.stagger_s and lane.group is not None:
                yield from _later(self._of_array(lane.group), lane.stagger_s, now)
            if lane.tag_sharing is not None:
                yield from _later(self._of_tag(lane.tag), lane.tag_sharing.stagger_s, now)

    def _of_array(self, group: int) -> float | None:
        if group not in self._of_arrays:
            self._of_arrays[group] = self._store.last_start_in_batch(group)
        return self._of_arrays[group]

    def _of_tag(self, tag: str) -> float | None:
        if tag not in self._of_tags:
            self._of_tags[tag] = self._store.last_start_with_tag(tag)
        return self._of_tags[tag]


def _later(last: float | None, stagger_s: float, now: float) -> Iterator[float]:
    if last is not None and last <= now < last + stagger_s:
        yield last + stagger_s
