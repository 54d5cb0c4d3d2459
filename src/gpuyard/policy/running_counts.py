"""What runs already, with the starts of the plan so far: counts, times and power, for the rules that limit starts."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from gpuyard.model.lease import Claim
from gpuyard.model.machine_snapshot import Snapshot
from gpuyard.policy.queue_order import Lane
from gpuyard.policy.wait_reasons import REMEDIES, Reason, ReasonKind, limit_reached
from gpuyard.policy.world import JobFacts, PowerLimit, RunningJob, World


class _Draw(Struct, frozen=True):
    """A job on its cards: its power on each, and the earliest time of its end."""

    cards: tuple[str, ...]
    each_w: float | None
    ends_at: float


class PowerBudget:
    """The power of all cards with the starts of one plan."""

    def __init__(self, limit: PowerLimit, snapshot: Snapshot, running: Sequence[RunningJob], now: float) -> None:
        self._limit = limit
        self._now = now
        self._card_of = {device.id: device.parent or device.id for device in snapshot.devices}
        self._measured_w = {device.id: device.power_draw_w or 0.0 for device in snapshot.devices}
        self._highest_w = {device.id: device.power_limit_w for device in snapshot.devices}
        self._draws: list[_Draw] = []
        self._starts_at: float | None = None  # the earliest start of the first job that waits for power
        for job in running:
            if job.device_ids and job.job_id in limit.running_w:
                ends_at = max(now, job.ends_after or now)
                self._draws.append(_Draw(self._cards(job.device_ids), limit.running_w[job.job_id], ends_at))

    def add_start(self, claim: Claim, own_w: float | None, least_s: float | None) -> None:
        """Count a job that starts and draws `own_w` per GPU (None: unknown); it takes at least `least_s`."""
        if claim.shares:
            self._draws.append(_Draw(self._cards(_ids(claim)), own_w, self._now + (least_s or 0.0)))

    def refusal(self, claim: Claim, own_w: float | None, most_s: float | None) -> Reason | None:
        """Return why the job may not start with this claim; None if it may. `most_s` is the longest that it takes."""
        if not claim.shares or not self._draws:
            return None
        draw = _Draw(self._cards(_ids(claim)), own_w, self._now)
        fits = self.total_w(draw) <= self._limit.limit_w
        if self._starts_at is None and not fits:
            # When enough jobs may have ended. What cards draw now that jobs use says nothing about the time after that.
            left = sorted(self._draws, key=lambda draw: draw.ends_at)
            busy = {card for draw in left for card in draw.cards}
            measured_w = {card: 0.0 if card in busy else drawn for card, drawn in self._measured_w.items()}
            self._starts_at = self._now
            while left and self._sum_w([*left, draw], measured_w) > self._limit.limit_w:
                self._starts_at = left.pop(0).ends_at
        elif self._starts_at is not None and fits and (most_s is None or self._now + most_s > self._starts_at):
            return self._reason(draw, "; another job waits for power, and this one could delay it")
        return None if fits else self._reason(draw)

    def _cards(self, device_ids: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._card_of[each] for each in device_ids if each in self._card_of))

    def total_w(self, *new: _Draw) -> float:
        """Return what all cards draw with the jobs that run or start, and with `new` ones."""
        return self._sum_w([*self._draws, *new], self._measured_w)

    def _sum_w(self, draws: Sequence[_Draw], measured_w: Mapping[str, float]) -> float:
        by_card: dict[str, float] = {}
        for draw in draws:
            for card in draw.cards:
                highest = self._highest_w.get(card)
                each_w = highest if draw.each_w is None else draw.each_w
                drawn = by_card.get(card, 0.0) + (each_w or 0.0)
                by_card[card] = drawn if highest is None else min(drawn, highest)
        return sum(max(measured, by_card.get(card, 0.0)) for card, measured in measured_w.items())

    def _reason(self, new: _Draw, why: str = "") -> Reason:
        now_w, then_w, limit_w = self.total_w(), self.total_w(new), self._limit.limit_w
        text = f"the GPUs would draw about {then_w:.0f} W with it and about {now_w:.0f} W without it"
        text, brief = f"{text}; at most {limit_w:.0f} W are allowed{why}", "the GPUs would draw too much power with it"
        return Reason(ReasonKind.POWER_LIMIT, text, had=then_w, needed=limit_w, remedy=REMEDIES["power"], brief=brief)


def _ids(claim: Claim) -> list[str]:
    return [share.device_id for share in claim.shares]


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
        self.counts = RunningCounts(world.running)
        self.last_starts = dict(world.last_starts)
        self.array_starts = dict(world.array_starts)
        self.has_started_run = False
        self.starts = self.starts_with_devices = 0
        self.power: PowerBudget | None = None
        if world.power is not None:
            self.power = PowerBudget(world.power, world.machine.snapshot, world.running, world.now)

    def add(self, lane: Lane, facts: JobFacts, claim: Claim) -> None:
        if self.power is not None:
            self.power.add_start(claim, facts.power_w, facts.estimate.least_s)
        if not lane.resumes:  # a suspended job counts as running already
            self.counts.add(lane.tag, lane.group, lane.need.devices, _ids(claim), takes_slot=lane.pace is None)
            self.last_starts[lane.tag] = self.world.now
            if lane.group is not None:
                self.array_starts[lane.group] = self.world.now
            self.starts += 1
            self.starts_with_devices += bool(claim.shares)
        self.has_started_run = self.has_started_run or lane.pace is not None
