"""Limits on starts: pauses, counts of running jobs, the pace of batches, and how the jobs of a tag share devices.

A job that waits for such a limit never becomes the head of the queue, so it delays no other job.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from msgspec.structs import replace

from gpuyard.core.lease import Claim, Need
from gpuyard.core.scheduling.batch_pacing import (
    PaceState,
    device_refusal,
    pace_refusals,
    stagger_refusal,
    watched_device_refusals,
)
from gpuyard.core.scheduling.placement import PlacementState
from gpuyard.core.scheduling.power_limit import PowerBudget
from gpuyard.core.scheduling.queue_order import Candidate, Lane
from gpuyard.core.scheduling.tag_sharing import spread_need
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind, limit_reached
from gpuyard.core.scheduling.world import JobFacts, RunningJob, World

# They keep jobs from starting, but not suspended ones from going on.
_FOR_STARTS = (ReasonKind.PAUSED, ReasonKind.DISK_FULL)
# The needs to try, in order; where there is none to try, the reasons.
Variants = tuple[Sequence[Need], tuple[Reason, ...]]


class RunningCounts:
    """The number of running jobs, including the starts of the current plan."""

    def __init__(self, running: Sequence[RunningJob]) -> None:
        self._by_tag: Counter[str] = Counter()
        self._by_group: Counter[int | None] = Counter()
        self.by_tag_and_device: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.without_devices = 0
        for job in running:
            self.add(job.tag, job.group, job.devices, job.device_ids, takes_slot=job.takes_slot)

    def add(
        self, tag: str, group: int | None, devices: int, device_ids: Iterable[str] = (), *, takes_slot: bool
    ) -> None:
        self._by_tag[tag] += 1
        self._by_group[group] += 1
        on_device = self.by_tag_and_device[tag]
        for device_id in device_ids:
            on_device[device_id] += 1
        self.without_devices += not devices and takes_slot

    def of_group(self, group: int) -> int:
        return self._by_group[group]

    def refusals(self, lane: Lane, tag_limits: Mapping[str, int]) -> tuple[Reason, ...]:
        """Return the limit of the lane's tag, or of its array or batch, that is reached."""
        most = tag_limits.get(lane.tag)
        if most is not None and self._by_tag[lane.tag] >= most:
            return (limit_reached(ReasonKind.TAG_LIMIT, f"jobs tagged '{lane.tag}'", most),)
        if lane.group_limit is not None and self._by_group[lane.group] >= lane.group_limit:
            what = "jobs of its array" if lane.pace is None else "runs of its batch"
            return (limit_reached(ReasonKind.ARRAY_LIMIT, what, lane.group_limit),)
        return ()


class StartLimits:
    """Counts running jobs and the starts of one plan, and refuses lanes that are at a limit."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._counted: list[tuple[Lane, Sequence[str]]] = []  # the starts of this plan, with their devices
        self._last_starts = dict(world.last_starts)
        self._array_starts = dict(world.array_starts)
        self._has_started_run = False
        self._started = self._started_with_devices = 0
        self._power = _power_budget(world)

    @cached_property
    def _counts(self) -> RunningCounts:
        """Running jobs and earlier starts of the plan, counted when a lane has a limit for which they matter."""
        counts = RunningCounts(self._world.running)
        for started in self._counted:
            _count(counts, *started)
        return counts

    def add_start(self, lane: Lane, facts: JobFacts, claim: Claim) -> None:
        if self._power is not None:
            self._power.add_start(claim, facts.power_w, facts.estimate.least_s)
        if not lane.resumes:  # a suspended job counts as running already
            self._counted.append((lane, [share.device_id for share in claim.shares]))
            if "_counts" in self.__dict__:
                _count(self._counts, *self._counted[-1])
            self._last_starts[lane.tag] = self._world.now
            if lane.group is not None:
                self._array_starts[lane.group] = self._world.now
            self._started += 1
            self._started_with_devices += bool(claim.shares)
        self._has_started_run = self._has_started_run or lane.pace is not None

    def refusals(self, lane: Lane) -> tuple[Reason, ...]:  # noqa: PLR0911 - one for each limit
        """Return why no job of the lane may start now, wherever it would run. Empty where one may."""
        world = self._world
        if lane.resumes:  # a suspended job counts as running already: neither a pause nor a full disk stops it
            return tuple(reason for reason in world.closed_reasons if reason.kind not in _FOR_STARTS)
        if world.closed_reasons:
            return world.closed_reasons
        if world.start_caps and (capped := self._cap_reasons(lane)):
            return capped
        if lane.tag in world.stopped_tags:
            return (Reason(ReasonKind.PAUSED, "its workspace is stopped; `gpuyard workspace start` continues it"),)
        is_counted = lane.tag in world.limits.tags or lane.group_limit is not None
        if is_counted and (reached := self._counts.refusals(lane, world.limits.tags)):
            return reached
        if lane.pace is not None:
            return self._run_refusals(lane)
        if not lane.need.devices and self._counts.without_devices >= world.limits.cpu_jobs:
            return (limit_reached(ReasonKind.CPU_LIMIT, "jobs without a GPU", world.limits.cpu_jobs),)
        return ()

    def disk_refusals(self, lane: Lane, job: Candidate) -> tuple[Reason, ...]:
        """Return why this job may not start now: a disk that it writes to is nearly full."""
        return job.full_disks if lane.writes_files and not lane.resumes else ()

    def power_refusals(self, facts: JobFacts, claim: Claim) -> tuple[Reason, ...]:
        """Return why the job may not start with this claim: all GPUs together would draw too much power."""
        if self._power is None:
            return ()
        reason = self._power.refusal(claim, facts.power_w, facts.estimate.most_s)
        return () if reason is None else (reason,)

    def _cap_reasons(self, lane: Lane) -> tuple[Reason, ...]:
        return tuple(
            cap.reason
            for cap in self._world.start_caps
            if (lane.need.devices or not cap.is_for_devices)
            and (self._started_with_devices if cap.is_for_devices else self._started) >= cap.most
        )

    def _run_refusals(self, lane: Lane) -> tuple[Reason, ...]:
        """Runs start one at a time, as the gates of their batch allow."""
        assert lane.pace is not None
        assert lane.group is not None
        if self._has_started_run:
            return (Reason(ReasonKind.STAGGERED, "another run is starting now"),)
        state, now = self._world.pace_states.get(lane.group, PaceState()), self._world.now
        watched = () if lane.need.devices else watched_device_refusals(lane.pace, state, lane.need, now)
        return (*pace_refusals(lane.pace, state, now), *watched)

    def stagger_refusals(self, lane: Lane) -> tuple[Reason, ...]:
        """Return why the next job of the tag or the array may not start yet: `stagger_s` has not passed since the last
        start."""
        if lane.stagger_s and not lane.resumes:
            last = self._array_starts.get(lane.group or 0, -math.inf)
            refusal = stagger_refusal("jobs of its array", lane.stagger_s, last, self._world.now)
            if refusal is not None:
                return (refusal,)
        if lane.tag_sharing is None:
            return ()
        last, now = self._last_starts.get(lane.tag, -math.inf), self._world.now
        next_at = last + lane.tag_sharing.stagger_s
        if not last <= now < next_at:  # a last start in the future comes from a clock that was set back: ignore it
            return ()
        return (Reason(ReasonKind.STAGGERED, f"the next task may start in {next_at - now:.1f} s"),)

    def variants(self, lane: Lane, need: Need, placement: PlacementState) -> Variants:
        """Narrow the need to the devices that the gates of its batch, or the limit of its tag, leave open."""
        if lane.pace is not None:
            return self._gated_variants(lane, need, placement)
        if lane.tag_sharing is not None:
            return self._spread_variants(lane, need, placement)
        return (need,), ()

    def _gated_variants(self, lane: Lane, need: Need, placement: PlacementState) -> Variants:
        assert lane.pace is not None
        assert lane.group is not None
        need = replace(need, ignores_foreign_load=lane.pace.max_gpu_percent is not None)
        state, now = self._world.pace_states.get(lane.group, PaceState()), self._world.now
        devices = list(placement.suitable_devices(need))
        refusals = {each.device.id: device_refusal(lane.pace, state, each, need, now) for each in devices}
        left = tuple(device_id for device_id, reason in refusals.items() if reason is None)
        if len(left) < need.devices <= len(devices):
            return (need,), tuple(reason for reason in refusals.values() if reason is not None)
        return (replace(need, only=left) if len(left) < len(devices) else need,), ()

    def _spread_variants(self, lane: Lane, need: Need, placement: PlacementState) -> Variants:
        """Return the need on the devices that have fewer jobs of the tag than its limit, the emptiest first."""
        assert lane.tag_sharing is not None
        devices = list(placement.suitable_devices(need))
        if len(devices) < need.devices:
            return (need,), ()
        counts = self._counts.by_tag_and_device[lane.tag]
        variants = spread_need(need, lane.tag_sharing, devices, counts)
        if variants:
            return variants, ()
        most = lane.tag_sharing.most_per_device
        if need.devices > 1:  # hold its places, or jobs that need one device would take each as it becomes free
            emptiest = sorted((state.device.id for state in devices), key=lambda each: (counts[each], each))
            for device_id in emptiest[: need.devices]:
                counts[device_id] = most
        return (need,), (limit_reached(ReasonKind.TAG_LIMIT, "tasks of its workspace on one GPU", most),)


def _count(counts: RunningCounts, lane: Lane, device_ids: Sequence[str]) -> None:
    counts.add(lane.tag, lane.group, lane.need.devices, device_ids, takes_slot=lane.pace is None)


def _power_budget(world: World) -> PowerBudget | None:
    if world.power is None:
        return None
    return PowerBudget(world.power, world.machine.snapshot, world.running, world.now)
