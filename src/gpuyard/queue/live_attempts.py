"""Jobs with a live attempt, the recent device time of users and tags, and when staggered jobs last started.

Everything kept here can be read from the store again.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.job import Attempt, Job, Usage
from gpuyard.model.lifecycle import JobState
from gpuyard.policy.queue_order import Lane, Party, WeightedUse, add_use, weight
from gpuyard.policy.usage_curve import holds_more_than_reserved
from gpuyard.store.job_store import JobStore


class Live(Struct, frozen=True, kw_only=True):
    job: Job
    attempt: Attempt

    def device_seconds(self, now: float) -> float:
        """Return for how long it has used its devices, together; a job without devices counts as one with one."""
        devices = self.job.spec.need.devices if self.attempt.engine else len(self.attempt.devices)
        return self.attempt.ran_s(now) * max(1, devices)


class LiveJobs(dict[int, Live]):
    """Live jobs by id, with indexes in the order in which they became live."""

    def __init__(self, lives: Iterable[Live] = ()) -> None:
        super().__init__()
        self.version = 0  # grows with each change but of usage
        self.apart: dict[int, Live] = {}  # with a time limit, or being stopped or suspended
        self.unpredicted: dict[int, Live] = {}  # started without a memory estimate
        self.outgrown: dict[int, Live] = {}  # were measured to hold more than they reserve
        self.without_devices: dict[int, Live] = {}  # of this machine
        self.on_device: dict[str, dict[int, Live]] = {}
        self.by_lease: dict[str, Live] = {}  # of two jobs of a slice, the later one
        for live in lives:
            self[live.job.id] = live

    def __setitem__(self, job_id: int, live: Live) -> None:
        before = self.get(job_id)
        if before is not None and before.attempt.devices != live.attempt.devices:
            self._forget_devices(before)
        if before is not None and before.attempt.lease_id != live.attempt.lease_id:
            self._forget_lease(before)
        super().__setitem__(job_id, live)
        self.version += 1
        job, attempt = live.job, live.attempt
        just_runs = job.state in (JobState.RUNNING, JobState.PENDING) and not attempt.stopping and not attempt.parked
        is_apart = not just_runs or attempt.stop_at is not None or attempt.kill_at is not None
        has_estimate = attempt.predicted_mb is not None or job.growth.memory_mb is not None or job.growth.is_alone
        is_unpredicted = job.spec.learns_memory and attempt.lease_id is not None and not has_estimate
        for index, is_member in (
            (self.apart, is_apart), (self.unpredicted, is_unpredicted), (self.without_devices, not attempt.devices),
            (self.outgrown, holds_more_than_reserved(attempt)),
        ):  # fmt: skip
            if is_member:
                index[job_id] = live
            else:
                index.pop(job_id, None)
        for device_id in attempt.devices:
            self.on_device.setdefault(device_id, {})[job_id] = live
        if attempt.lease_id is not None and (before is None or self._holds_lease(live)):
            self.by_lease[attempt.lease_id] = live

    def set_usage(self, job_id: int, usage: Usage) -> None:
        """Replace what a job was measured to use."""
        before = self[job_id]
        self[job_id] = Live(job=before.job, attempt=replace(before.attempt, usage=usage))
        self.version -= 1

    def take(self, job_id: int) -> Live:
        """Remove and return a job whose attempt is over."""
        self.version += 1
        for index in (self.apart, self.unpredicted, self.outgrown, self.without_devices):
            index.pop(job_id, None)
        live = self.pop(job_id)
        self._forget_devices(live)
        self._forget_lease(live)
        return live

    def _holds_lease(self, live: Live) -> bool:
        """Return whether no other job has taken over the lease."""
        holder = self.by_lease.get(live.attempt.lease_id or "")
        return holder is None or holder.job.id == live.job.id

    def _forget_lease(self, live: Live) -> None:
        if live.attempt.lease_id is not None and self._holds_lease(live):
            self.by_lease.pop(live.attempt.lease_id, None)

    def _forget_devices(self, live: Live) -> None:
        for device_id in live.attempt.devices:
            there = self.on_device[device_id]
            there.pop(live.job.id, None)
            if not there:
                del self.on_device[device_id]


class RecentUse:
    """By which jobs of equal priority are ordered. Kept in memory, and written to the store by `save`."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._uses: dict[Party, WeightedUse] = {}
        self._unsaved: set[Party] = set()

    def reload(self) -> None:
        self._uses = self._store.learned.recent_use()
        self._unsaved.clear()

    def add(self, ended: Live, now: float) -> None:
        party = ended.job.user, ended.job.spec.tag
        self._uses[party] = add_use(self._uses.get(party, WeightedUse()), ended.device_seconds(now), now)
        self._unsaved.add(party)

    def used(self, running: Iterable[Live], now: float) -> dict[Party, float]:
        """Return the recent use of each user and tag, including running jobs."""
        used = {party: weight(use, now) for party, use in self._uses.items()}
        for live in running:
            party = live.job.user, live.job.spec.tag
            used[party] = used.get(party, 0.0) + live.device_seconds(now)
        return used

    def save(self) -> None:
        for party in self._unsaved & self._uses.keys():
            self._store.learned.set_recent_use(party, self._uses[party])
        self._unsaved.clear()


class StaggeredStarts:
    """When jobs last started whose starts are staggered: of an array, by its id, and of a tag with sharing rules."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._known: dict[int | str, float | None] = {}
        self.clear = self._known.clear

    def note(self, job: Job, at: float) -> None:
        if job.spec.tag_sharing is not None:
            self._known[job.spec.tag] = at
        if job.spec.stagger_s and job.group is not None:
            self._known[job.group] = at

    def of_arrays(self, lanes: Iterable[Lane]) -> dict[int, float]:
        """Return the last start of each staggered array among these lanes that has started."""
        found = {lane.group: self._last(lane.group) for lane in lanes if lane.stagger_s and lane.group is not None}
        return {group: at for group, at in found.items() if at is not None}

    def of_tags(self, lanes: Iterable[Lane]) -> dict[str, float]:
        """Return the last starts of the tags with sharing rules among these lanes."""
        found = ((lane.tag, self._last(lane.tag)) for lane in lanes if lane.tag_sharing is not None)
        return {tag: at for tag, at in found if at is not None}

    def next_starts(self, lanes: Iterable[Lane], now: float) -> Iterator[float]:
        """Yield when the next job of each staggered array and tag may start, where that is later than now."""
        for lane in lanes:
            waits = []
            if lane.stagger_s and lane.group is not None:
                waits.append((self._last(lane.group), lane.stagger_s))
            if lane.tag_sharing is not None:
                waits.append((self._last(lane.tag), lane.tag_sharing.stagger_s))
            yield from (at + wait_s for at, wait_s in waits if at is not None and at <= now < at + wait_s)

    def _last(self, key: int | str) -> float | None:
        if key not in self._known:
            of_array, of_tag = self._store.last_start_in_batch, self._store.last_start_with_tag
            self._known[key] = of_array(key) if isinstance(key, int) else of_tag(key)
        return self._known[key]
