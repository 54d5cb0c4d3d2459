"""Queue order: priority, which rises with waiting time (a level for each AGEING_S), then fair share (the user and tag
with the least recent use, which halves per USE_HALF_LIFE_S, and running jobs count as they run), then submission.

Ready jobs wait in lanes. All jobs of a lane are alike, so only its first job is considered: where that cannot start,
none behind it can. The cost of a step grows with its starts and with the lanes, not with the number of waiting jobs.
"""

import heapq
import math
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
    """A job that is ready. Jobs of one `kind` have the same need and duration. `full_disks`: why it may not write."""

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
    queues: Sequence[LaneQueue],
    used: Mapping[Party, float],
    now: float,
    explained_lane: int | None = None,
    most: float = MOST_LANES,
) -> list[tuple[LaneQueue, Candidate]]:
    """Return the first lanes with devices, the first without, and `explained_lane`, each with its first job."""
    heads = [(queue, first) for queue in queues if (first := next(queue.jobs, None)) is not None]
    if len(heads) <= most:
        return heads

    def rank(entry: tuple[LaneQueue, Candidate]) -> tuple[int, float, int]:
        lane, first = entry[0].lane, entry[1]
        return -current_priority(lane.priority, first.queued_at, now), used.get(lane.party, 0.0), first.job_id

    ranked = [queue.lane for queue, _ in sorted(heads, key=rank)]
    kept = {explained_lane}
    for has_devices in (True, False):
        kept.update([lane.id for lane in ranked if bool(lane.need.devices) is has_devices][: int(most)])
    return [entry for entry in heads if entry[0].lane.id in kept]


class QueueOrder:
    """The first job of each lane, in queue order. A start changes only the use of its own party (user and tag). So each
    party keeps the first jobs of its lanes in a heap, and after each job only its party is placed again in the heap of
    parties."""

    def __init__(
        self,
        queues: Sequence[LaneQueue],
        used: Mapping[Party, float],
        now: float,
        *,
        explained_lane: int | None = None,
        most_lanes: float = MOST_LANES,
    ) -> None:
        self._now, self._used = now, dict(used)
        self._parties: dict[Party, list[tuple[int, int, LaneQueue, Candidate]]] = {}
        for queue, head in most_urgent(queues, used, now, explained_lane, most_lanes):
            self._parties.setdefault(queue.lane.party, []).append(self._entry(queue, head))
        for waiting in self._parties.values():
            heapq.heapify(waiting)
        self._order = [self._rank(party) for party in self._parties]
        heapq.heapify(self._order)

    def first(self) -> tuple[Lane, Candidate] | None:
        if not self._order:
            return None
        _, _, queue, head = self._parties[self._order[0][-1]][0]
        return queue.lane, head

    def advance(self) -> None:
        """Replace the first job, which starts, by the next one of its lane, and count the start as use."""
        party = self._order[0][-1]
        devices = self._parties[party][0][2].lane.need.devices
        self._used[party] = self._used.get(party, 0.0) + STARTING_S * max(1, devices)
        self.pass_over()

    def pass_over(self) -> None:
        """Replace the first job, which cannot start, by the next one of its lane."""
        queue = self._parties[self._order[0][-1]][0][2]
        following = next(queue.jobs, None)
        self._replace_first(None if following is None else self._entry(queue, following))

    def drop(self) -> None:
        """Remove the lane of the first job: none of its jobs can start now."""
        self._replace_first(None)

    def _replace_first(self, entry: tuple[int, int, LaneQueue, Candidate] | None) -> None:
        party = self._order[0][-1]
        waiting = self._parties[party]
        if entry is None:
            heapq.heappop(waiting)
        else:
            heapq.heapreplace(waiting, entry)
        if waiting:
            heapq.heapreplace(self._order, self._rank(party))
        else:
            heapq.heappop(self._order)

    def _entry(self, queue: LaneQueue, head: Candidate) -> tuple[int, int, LaneQueue, Candidate]:
        return -current_priority(queue.lane.priority, head.queued_at, self._now), head.job_id, queue, head

    def _rank(self, party: Party) -> tuple[int, float, int, Party]:
        priority, job_id, _, _ = self._parties[party][0]
        return priority, self._used.get(party, 0.0), job_id, party


def full_order(queues: Sequence[LaneQueue], used: Mapping[Party, float], now: float) -> Iterator[Candidate]:
    """Yield the jobs of all lanes, at a cost that hardly grows with the lanes."""
    order = QueueOrder(queues, used, now, most_lanes=math.inf)
    while (first := order.first()) is not None:
        yield first[1]
        order.advance()
