"""Who is next: priority, then fair share, then submission; and who waits long rises, so that nobody starves.

Ready jobs stand in lanes. All jobs of a lane have the same priority, owner, tag, need and array, so only its first job
has to be looked at: where it cannot start, none behind it can. A step costs what it starts and how many kinds of jobs
there are, not how many wait.

- A job gains one level of priority for each AGEING_S that it has been queued, whatever it was submitted with.
- Within a level, those go first whose user and tag have used the least of late: use loses half of its weight per
  HALF_LIFE_S, and what runs counts as it goes.
- Then whoever was submitted first.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.batch_pacing import BatchPace
from gpuyard.core.scheduling.tag_sharing import TagSharing

AGEING_S = 600.0
HALF_LIFE_S = 86_400.0
# Lanes beyond this many, with devices or without, are not looked at in one step; their jobs rise as those before them
# start.
MOST_LANES = 256
# What a start counts for until the job has run for a while, so that two tags take turns within one step.
STARTING_S = 1.0

Party = tuple[str, str]


class Lane(Struct, frozen=True, kw_only=True):
    """`group` is the array whose `group_limit` holds for it; a large submission is a `batch` with lanes of its own.

    Where a lane `sizes_each`, each of its jobs has a need of its own, which is learned or has grown. One that `resumes`
    has a single job, which is suspended; one that `preempts` may have others make room. The runs of a batch, which is a
    `group`, start at its `pace`. Where there is a `crew`, it is all that have the tag. Where there is an `engine`, that
    places its jobs, of which it is asked the same: these are its `demands`.
    """

    id: int
    priority: int
    user: str
    tag: str
    need: Need
    group: int | None = None
    group_limit: int | None = None
    batch: int | None = None
    sizes_each: bool = False
    resumes: bool = False
    preempts: bool = False
    pace: BatchPace | None = None
    crew: TagSharing | None = None
    engine: str = ""
    demands: tuple[str, ...] = ()

    @property
    def party(self) -> Party:
        return self.user, self.tag


class Candidate(Struct, frozen=True, kw_only=True):
    """A job that could start now, if there is room; `queued_at` is since when."""

    job_id: int
    queued_at: float


class LaneQueue(Struct, frozen=True, kw_only=True):
    """A lane and its jobs, first come first; they are fetched as they are asked for."""

    lane: Lane
    jobs: Iterator[Candidate]


class WeightedUse(Struct, frozen=True, kw_only=True):
    """Device-seconds (for work without devices: seconds), as they weighed `at` that time."""

    seconds: float = 0.0
    at: float = 0.0


def weight(use: WeightedUse, now: float) -> float:
    return float(use.seconds * 0.5 ** (max(0.0, now - use.at) / HALF_LIFE_S))


def add_use(use: WeightedUse, seconds: float, now: float) -> WeightedUse:
    return WeightedUse(seconds=weight(use, now) + seconds, at=now)


def level(priority: int, queued_at: float, now: float) -> int:
    """The priority that a job has by now."""
    return priority + max(0, int((now - queued_at) // AGEING_S))


class QueueLine:
    """The lanes' first jobs in their order; a start or a refusal brings the next one forward."""

    def __init__(
        self,
        queues: Sequence[LaneQueue],
        used: Mapping[Party, float],
        now: float,
        *,
        about: int | None = None,
        is_whole: bool = False,
    ) -> None:
        """`about` is a lane that is looked at however many there are; `is_whole` looks at all of them."""
        self._now = now
        self._used = dict(used)
        heads = ((queue, next(queue.jobs, None)) for queue in queues)
        self._heads = [(queue, head) for queue, head in heads if head is not None]
        if len(self._heads) > MOST_LANES and not is_whole:
            with_devices = [entry for entry in self._heads if entry[0].lane.need.devices]
            without = [entry for entry in self._heads if not entry[0].lane.need.devices]
            first = [entry for kind in (with_devices, without) for entry in sorted(kind, key=self._rank)[:MOST_LANES]]
            asked = [entry for entry in self._heads if entry[0].lane.id == about and entry not in first]
            self._heads = first + asked

    def first(self) -> tuple[Lane, Candidate] | None:
        if not self._heads:
            return None
        queue, head = min(self._heads, key=self._rank)
        return queue.lane, head

    def advance(self, lane: Lane) -> None:
        """Its first job starts: its next one stands in line now."""
        self._used[lane.party] = self._used.get(lane.party, 0.0) + STARTING_S * max(1, lane.need.devices)
        self.pass_over(lane)

    def pass_over(self, lane: Lane) -> None:
        """Its first job cannot start, but its next one may."""
        for place, (queue, _) in enumerate(self._heads):
            if queue.lane is lane:
                following = next(queue.jobs, None)
                if following is None:
                    del self._heads[place]
                else:
                    self._heads[place] = (queue, following)
                return

    def drop(self, lane: Lane) -> None:
        """Nothing of it can start now."""
        self._heads = [entry for entry in self._heads if entry[0].lane is not lane]

    def _rank(self, entry: tuple[LaneQueue, Candidate]) -> tuple[int, float, int]:
        queue, head = entry
        lane = queue.lane
        now_at = level(lane.priority, head.queued_at, self._now)
        return -now_at, self._used.get(lane.party, 0.0), head.job_id


def whole_order(queues: Sequence[LaneQueue], used: Mapping[Party, float], now: float) -> Iterator[Candidate]:
    """All jobs as a whole Line would bring them forward, at a cost that hardly grows with the lanes.

    A start changes only what its own party has used: so each party has its lanes' first jobs in order, and of the
    parties only the one whose job was taken has to find its place anew.
    """
    weights = dict(used)
    parties: dict[Party, list[tuple[int, int, int]]] = {}
    heads: list[Candidate | None] = [next(queue.jobs, None) for queue in queues]
    for place, (queue, head) in enumerate(zip(queues, heads, strict=True)):
        if head is not None:
            parties.setdefault(queue.lane.party, []).append(_urgency(queue.lane, head, now, place))
    line: list[tuple[int, float, int, Party]] = []
    for party, waiting in parties.items():
        heapq.heapify(waiting)
        line.append((waiting[0][0], weights.get(party, 0.0), waiting[0][1], party))
    heapq.heapify(line)
    while line:
        party = line[0][3]
        waiting = parties[party]
        place = waiting[0][2]
        lane, head = queues[place].lane, heads[place]
        assert head is not None
        yield head
        weights[party] = weights.get(party, 0.0) + STARTING_S * max(1, lane.need.devices)
        heads[place] = following = next(queues[place].jobs, None)
        if following is None:
            heapq.heappop(waiting)
        else:
            heapq.heapreplace(waiting, _urgency(lane, following, now, place))
        if waiting:
            heapq.heapreplace(line, (waiting[0][0], weights[party], waiting[0][1], party))
        else:
            heapq.heappop(line)


def _urgency(lane: Lane, head: Candidate, now: float, place: int) -> tuple[int, int, int]:
    return -level(lane.priority, head.queued_at, now), head.job_id, place
