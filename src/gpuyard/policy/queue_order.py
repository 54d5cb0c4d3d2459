"""Queue order: priority, then fair share, then submission. Priority rises with waiting time, so that no job starves.

Ready jobs wait in lanes. All jobs of a lane have the same priority, owner, tag, need and array, so only its first job
is considered: where that cannot start, none behind it can. The cost of a step grows with the jobs that it starts and
with the number of lanes, not with the number of waiting jobs.

- A job gains one level of priority for each AGEING_S that it has been queued, whatever priority it was submitted with.
- Within a level, the user and tag with the least recent use goes first: it loses half its weight per USE_HALF_LIFE_S,
  and running jobs count as they run.
- Then the job that was submitted first.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from gpuyard.model.job_spec import BatchPace, TagSharing
from gpuyard.model.lease import Need
from gpuyard.policy.numbers import AGEING_S, MOST_LANES, STARTING_S, USE_HALF_LIFE_S
from gpuyard.policy.wait_reasons import Reason

Party = tuple[str, str]


class Lane(Struct, frozen=True, kw_only=True):
    """Ready jobs that are alike."""

    id: int
    priority: int
    user: str
    tag: str
    need: Need
    group: int | None = None  # the array or batch of the jobs; at most `group_limit` of it run at a time
    group_limit: int | None = None
    batch: int | None = None  # set for a large submission, which has lanes of its own
    sizes_each: bool = False  # each job has a need of its own, which is learned or has grown
    resumes: bool = False  # the lane has a single job, which is suspended
    preempts: bool = False  # its jobs may preempt others
    pace: BatchPace | None = None  # when the runs of a batch may start
    tag_sharing: TagSharing | None = None  # how all jobs with the tag share devices
    writes_files: bool = False  # its jobs write to disks of their own, or have a limit of free space
    engine: str = ""  # the cluster engine that places its jobs
    demands: tuple[str, ...] = ()  # the engine's options that they have in common
    stagger_s: float = 0.0  # the least time between two starts of the group

    @property
    def party(self) -> Party:
        return self.user, self.tag


class Candidate(Struct, frozen=True, kw_only=True):
    """A job that is ready to start since `queued_at`. Jobs of one `kind` have the same need and duration; None: nothing
    is known about it. `full_disks`: why it may not write to its disks now."""

    job_id: int
    queued_at: float
    kind: int | None = None
    full_disks: tuple[Reason, ...] = ()


class LaneQueue(Struct, frozen=True, kw_only=True):
    """A lane and its jobs in order of submission, fetched lazily."""

    lane: Lane
    jobs: Iterator[Candidate]


class WeightedUse(Struct, frozen=True, kw_only=True):
    """Device-seconds (for jobs without devices: seconds), weighted as of the time `at`."""

    seconds: float = 0.0
    at: float = 0.0


def weight(use: WeightedUse, now: float) -> float:
    return float(use.seconds * 0.5 ** (max(0.0, now - use.at) / USE_HALF_LIFE_S))


def add_use(use: WeightedUse, seconds: float, now: float) -> WeightedUse:
    return WeightedUse(seconds=weight(use, now) + seconds, at=now)


def current_priority(priority: int, queued_at: float, now: float) -> int:
    """Return the job's priority with what it has gained by waiting."""
    return priority + max(0, int((now - queued_at) // AGEING_S))


def most_urgent(
    queues: Sequence[LaneQueue], used: Mapping[Party, float], now: float, explained_lane: int | None = None
) -> list[tuple[LaneQueue, Candidate]]:
    """Return the lanes that a step considers, each with its first job: the MOST_LANES that come first with devices, as
    many without, and `explained_lane`."""
    heads = [(queue, first) for queue in queues if (first := next(queue.jobs, None)) is not None]
    if len(heads) <= MOST_LANES:
        return heads

    def rank(entry: tuple[LaneQueue, Candidate]) -> tuple[int, float, int]:
        lane, first = entry[0].lane, entry[1]
        return -current_priority(lane.priority, first.queued_at, now), used.get(lane.party, 0.0), first.job_id

    ranked = [queue.lane for queue, _ in sorted(heads, key=rank)]
    kept = {explained_lane}
    for has_devices in (True, False):
        kept.update([lane.id for lane in ranked if bool(lane.need.devices) is has_devices][:MOST_LANES])
    return [entry for entry in heads if entry[0].lane.id in kept]


class QueueOrder:
    """The first job of each lane, in queue order. A start or a refusal brings the lane's next job forward."""

    def __init__(
        self, queues: Sequence[LaneQueue], used: Mapping[Party, float], now: float, *, explained_lane: int | None = None
    ) -> None:
        self._now, self._used = now, dict(used)
        self._heads = {  # with the priority of the first job, with what that has gained by waiting
            queue.lane.id: (queue, first, current_priority(queue.lane.priority, first.queued_at, now))
            for queue, first in most_urgent(queues, used, now, explained_lane)
        }

    def first(self) -> tuple[Lane, Candidate] | None:
        if not self._heads:
            return None
        entries = self._heads.values()
        queue, head, _ = next(iter(entries)) if len(entries) == 1 else min(entries, key=self._rank)
        return queue.lane, head

    def advance(self, lane: Lane) -> None:
        """Replace the lane's first job, which starts, by its next one, and count the start as use."""
        self._used[lane.party] = self._used.get(lane.party, 0.0) + STARTING_S * max(1, lane.need.devices)
        self.pass_over(lane)

    def pass_over(self, lane: Lane) -> None:
        """Replace the lane's first job, which cannot start, by its next one."""
        queue = self._heads.pop(lane.id)[0]
        if (head := next(queue.jobs, None)) is not None:
            self._heads[lane.id] = queue, head, current_priority(queue.lane.priority, head.queued_at, self._now)

    def drop(self, lane: Lane) -> None:
        """Remove a lane of which no job can start now."""
        del self._heads[lane.id]

    def _rank(self, entry: tuple[LaneQueue, Candidate, int]) -> tuple[int, float, int]:
        queue, head, priority = entry
        return -priority, self._used.get(queue.lane.party, 0.0), head.job_id


def full_order(queues: Sequence[LaneQueue], used: Mapping[Party, float], now: float) -> Iterator[Candidate]:
    """Yield the jobs of all lanes in the order of a QueueOrder, at a cost that hardly grows with the lanes. A start
    changes only the use of its own party (user and tag). So each party keeps the first jobs of its lanes in a heap, and
    after each job only its party is placed again in the heap of parties."""
    weights = dict(used)
    parties: dict[Party, list[tuple[int, int, int]]] = {}
    heads: list[Candidate | None] = [next(queue.jobs, None) for queue in queues]

    def urgency(head: Candidate, place: int) -> tuple[int, int, int]:
        return -current_priority(queues[place].lane.priority, head.queued_at, now), head.job_id, place

    for place, head in enumerate(heads):
        if head is not None:
            parties.setdefault(queues[place].lane.party, []).append(urgency(head, place))
    for waiting in parties.values():
        heapq.heapify(waiting)
    order = [(waiting[0][0], weights.get(each, 0.0), waiting[0][1], each) for each, waiting in parties.items()]
    heapq.heapify(order)
    while order:
        party = order[0][3]
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
            heapq.heapreplace(waiting, urgency(following, place))
        if waiting:
            heapq.heapreplace(order, (waiting[0][0], weights[party], waiting[0][1], party))
        else:
            heapq.heappop(order)
