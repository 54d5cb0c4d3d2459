"""What runs already, with the starts of the plan so far: counts, times and power, for the rules that limit starts."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from gpuyard.core.lease import Claim
from gpuyard.core.scheduling.power_limit import PowerBudget
from gpuyard.core.scheduling.queue_order import Lane
from gpuyard.core.scheduling.wait_reasons import Reason, limit_reached
from gpuyard.core.scheduling.world import JobFacts, RunningJob, World


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

    def refusal(self, lane: Lane, tag_limits: Mapping[str, int]) -> Reason | None:
        """Return the limit of the lane's tag, or of its array or batch, that is reached."""
        return self.tag_refusal(lane, tag_limits) or self.group_refusal(lane)

    def tag_refusal(self, lane: Lane, tag_limits: Mapping[str, int]) -> Reason | None:
        most = tag_limits.get(lane.tag)
        if most is not None and self._by_tag[lane.tag] >= most:
            return limit_reached(f"jobs tagged '{lane.tag}'", most, "tag-limit")
        return None

    def group_refusal(self, lane: Lane) -> Reason | None:
        if lane.group_limit is not None and self._by_group[lane.group] >= lane.group_limit:
            what = "jobs of its array" if lane.pace is None else "runs of its batch"
            return limit_reached(what, lane.group_limit, "array-limit")
        return None


class StartedSoFar:
    def __init__(self, world: World) -> None:
        self.world = world
        self._counted: list[tuple[Lane, Sequence[str]]] = []  # the starts of this plan, with their devices
        self.last_starts = dict(world.last_starts)
        self.array_starts = dict(world.array_starts)
        self.has_started_run = False
        self.starts = self.starts_with_devices = 0
        self.power: PowerBudget | None = None
        if world.power is not None:
            self.power = PowerBudget(world.power, world.machine.snapshot, world.running, world.now)

    @cached_property
    def counts(self) -> RunningCounts:
        """Running jobs and earlier starts of the plan, counted when a lane has a limit for which they matter."""
        counts = RunningCounts(self.world.running)
        for lane, device_ids in self._counted:
            counts.add(lane.tag, lane.group, lane.need.devices, device_ids, takes_slot=lane.pace is None)
        return counts

    def add(self, lane: Lane, facts: JobFacts, claim: Claim) -> None:
        if self.power is not None:
            self.power.add_start(claim, facts.power_w, facts.estimate.least_s)
        if not lane.resumes:  # a suspended job counts as running already
            device_ids = [share.device_id for share in claim.shares]
            self._counted.append((lane, device_ids))
            if "counts" in self.__dict__:
                self.counts.add(lane.tag, lane.group, lane.need.devices, device_ids, takes_slot=lane.pace is None)
            self.last_starts[lane.tag] = self.world.now
            if lane.group is not None:
                self.array_starts[lane.group] = self.world.now
            self.starts += 1
            self.starts_with_devices += bool(claim.shares)
        self.has_started_run = self.has_started_run or lane.pace is not None
