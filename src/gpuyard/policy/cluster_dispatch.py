"""plan_dispatch(view): which jobs go to engines that place work themselves, and the reasons why others wait.

- An engine that reports its free resources (Ray) gets only what fits: its own queue knows no priorities. The first job
  that does not fit blocks all later jobs for the engine, unless no node of it is large enough for the job.
- An engine with its own queue (Slurm) gets a buffer: as many wait there as twice what runs there, and at least 16. An
  array counts as one there. A job is never kept back by jobs of lower priority.
- An array with a limit is one submission that keeps the limit there. While any of its jobs are there, others of it
  follow one by one, as the limit allows.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from gpuyard.model.cluster_terms import (
    ROUNDING,
    ClusterTerms,
    Offer,
    amount_needed,
    impossible,
    subtract,
    without_learned,
)
from gpuyard.model.lease import Claim, Need
from gpuyard.model.units import format_size
from gpuyard.policy.queue_order import Candidate, Lane, LaneQueue, Party, QueueOrder
from gpuyard.policy.running_counts import RunningCounts
from gpuyard.policy.wait_reasons import Reason, ReasonKind, limit_reached
from gpuyard.policy.world import Plan, RunningJob, Start, WaitingJob

# If a step reaches this limit, the next step follows at once.
MAX_STARTS_PER_STEP = 2000


class DispatchView(Struct, frozen=True, kw_only=True):
    """Input of `plan_dispatch`."""

    now: float
    queues: Sequence[LaneQueue]
    offers: Mapping[str, Offer]
    live: Mapping[str, int]  # number of live attempts of each engine
    terms: Callable[[int], ClusterTerms]  # called only for jobs that may start
    # Of each engine: the priorities of the jobs that wait there, one for each array, and the number of those that run.
    buffered: Mapping[str, Sequence[int]] = {}
    started: Mapping[str, int] = {}
    running: Sequence[RunningJob] = ()  # all live attempts, here and on other machines
    used: Mapping[Party, float] = {}
    shut: tuple[Reason, ...] = ()
    stopped: frozenset[str] = frozenset()
    tags: Mapping[str, int] = {}
    refused: Mapping[int, Reason] = {}  # reasons of lanes that their engine refused a short time ago, by lane id


def plan_dispatch(view: DispatchView, *, about: int | None = None) -> Plan:
    """Plan the starts and holds of this step. Lane `about` is always considered, no matter how many lanes wait."""
    return _Dispatcher(view, about).plan()


class _Dispatcher:
    def __init__(self, view: DispatchView, about: int | None) -> None:
        self._view = view
        self._counts = RunningCounts(view.running)
        self._live = dict(view.live)
        self._buffered = {name: sorted(priorities) for name, priorities in view.buffered.items()}
        self._free = {name: offer.free for name, offer in view.offers.items()}
        self._full: dict[str, Reason] = {}
        self._starts: list[Start] = []
        self._holds: dict[int, WaitingJob] = {}
        self._whole: dict[int, tuple[ClusterTerms, int]] = {}  # terms of the one submission of an array, places left
        self._line = QueueOrder(list(self._in_reach(view.queues)), view.used, view.now, explained_lane=about)

    def _in_reach(self, queues: Sequence[LaneQueue]) -> Iterator[LaneQueue]:
        """Hold lanes of unavailable engines at once, so that they cannot push lanes of other engines out of view."""
        for queue in queues:
            if self._offer(queue.lane).trouble is None:
                yield queue
            elif (first := next(queue.jobs, None)) is not None:
                self._hold(queue.lane, first, queue.lane.need, self._refuse(queue.lane))

    def plan(self) -> Plan:
        while (first := self._line.first()) is not None and len(self._starts) < MAX_STARTS_PER_STEP:
            self._consider(*first)
        return Plan(starts=tuple(self._starts), waiting=tuple(self._holds.values()))

    def _consider(self, lane: Lane, candidate: Candidate) -> None:
        need, refusal = lane.need, self._refuse(lane)
        if not refusal:
            terms = self._view.terms(candidate.job_id)
            need, refusal = terms.need, self._refuse_apart(lane, terms) or self._refuse_buffered(lane, terms)
            refusal = refusal or self._take(lane, candidate, terms)
            if not refusal:
                self._start(lane, candidate, terms)
                return
        self._hold(lane, candidate, need, refusal)
        self._line.drop()

    def _hold(self, lane: Lane, candidate: Candidate, need: Need, why: tuple[Reason, ...]) -> None:
        self._holds.setdefault(lane.id, WaitingJob(job_id=candidate.job_id, lane=lane, need=need, reasons=why))

    def _start(self, lane: Lane, candidate: Candidate, terms: ClusterTerms) -> None:
        self._line.advance()
        offer, group, is_limited = self._offer(lane), lane.group or 0, lane.group_limit is not None
        # Count the job in the one submission of its array, which begins with it if the engine has no other job of it.
        if group in self._whole:
            alike, left = self._whole[group]
            self._whole[group] = alike, left - 1
        elif group and is_limited and offer.free is None and offer.most_in_array and not self._counts.of_group(group):
            self._whole[group] = without_learned(terms), offer.most_in_array - 1
        if not self._has_array(terms):
            insort(self._buffered.setdefault(lane.engine, []), lane.priority)
        self._live[lane.engine] = self._live.get(lane.engine, 0) + 1
        self._counts.add(lane.tag, terms.group, lane.need.devices, takes_slot=False)
        self._starts.append(Start(job_id=candidate.job_id, lane=lane, claim=Claim(shares=()), terms=terms))

    def _offer(self, lane: Lane) -> Offer:
        return self._view.offers.get(lane.engine, Offer())

    def _refuse(self, lane: Lane) -> tuple[Reason, ...]:  # noqa: PLR0911 - one for each reason
        view, trouble, most = self._view, self._offer(lane).trouble, self._offer(lane).most_jobs
        if view.shut:
            return view.shut
        if trouble is not None:
            return (Reason(ReasonKind.ENGINE, trouble),)
        if lane.tag in view.stopped:
            return (Reason(ReasonKind.PAUSED, "its workspace was stopped: `gpuyard workspace start` lets it go on"),)
        if lane.id in view.refused:
            return (view.refused[lane.id],)
        reached = self._counts.tag_refusal(lane, self._view.tags)
        if reached is None and lane.group not in self._whole:
            reached = self._counts.group_refusal(lane)
        if reached is not None:
            return (reached,)
        if most is not None and self._live.get(lane.engine, 0) >= most:
            return (limit_reached(f"jobs on {lane.engine} (most_jobs)", most),)
        return (self._full[lane.engine],) if lane.engine in self._full else ()

    def _refuse_buffered(self, lane: Lane, terms: ClusterTerms) -> tuple[Reason, ...]:
        if self._offer(lane).free is not None or self._has_array(terms):
            return ()
        buffered = self._buffered.get(lane.engine, ())
        ahead = len(buffered) - bisect_left(buffered, lane.priority)
        if ahead < max(16, 2 * self._view.started.get(lane.engine, 0)):
            return ()
        return (Reason(ReasonKind.LIMIT, f"enough jobs wait at {lane.engine}: others follow as they start"),)

    def _has_array(self, terms: ClusterTerms) -> bool:
        return terms.group is not None and bool(self._counts.of_group(terms.group))

    def _refuse_apart(self, lane: Lane, terms: ClusterTerms) -> tuple[Reason, ...]:
        """Refuse a job that needs a second submission of its array: each would keep the limit for itself."""
        alike, left = self._whole.get(lane.group or 0, (None, 0))
        if alike is None or (left > 0 and without_learned(terms) == alike):
            return ()
        return (limit_reached("jobs of its array", lane.group_limit or 0),)

    def _take(self, lane: Lane, candidate: Candidate, terms: ClusterTerms) -> tuple[Reason, ...]:
        """Subtract the job from the free resources of its engine; return the reason if they do not suffice."""
        offer, free = self._offer(lane), self._free.get(lane.engine)
        wanted = amount_needed(terms, offer.card_mb)
        never = impossible(lane.engine, offer.nodes, wanted)
        if never is not None:  # it may never start, so it does not block others
            return (Reason(ReasonKind.NO_ROOM, never),)
        if free is None:
            return ()
        for name, had, needed in (
            ("GPUs", free.gpus, wanted.gpus or 0.0),
            ("CPUs", free.cpus, wanted.cpus or 0.0),
            ("RAM", free.ram_mb, wanted.ram_mb or 0.0),
        ):
            if had is not None and needed > had + ROUNDING:
                has, needs = f"{had:g}", f"{needed:g}"
                if name == "RAM":
                    has, needs = format_size(max(0.0, had)), format_size(needed)
                ahead = f"job {candidate.job_id} is ahead and does not fit on {lane.engine} yet"
                self._full[lane.engine] = Reason(ReasonKind.AWAITED, ahead)
                return (
                    Reason(
                        ReasonKind.NO_ROOM, f"{lane.engine} has {has} {name} free, {needs} needed", None, had, needed
                    ),
                )
        self._free[lane.engine] = subtract(free, wanted)
        return ()
