"""hand_over(view): which jobs go to the engines that place work themselves, and in the same words why others do not.

An engine that tells what is free there is given what fits and no more: its own line knows no priorities, so the line is
here. The first that does not fit holds up all behind it that are for the same engine, unless it needs more than there
is at all. One that takes everything is given everything, up to the number that it will hold.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from gpuyard.core.cluster.offer import Amount, ClusterTerms, Offer, amount_of, less
from gpuyard.core.lease import Claim, Need
from gpuyard.core.scheduling.plan import Plan, Start, WaitingJob
from gpuyard.core.scheduling.preemption import RunningJob
from gpuyard.core.scheduling.queue_order import Candidate, Lane, LaneQueue, Party, QueueOrder
from gpuyard.core.scheduling.running_counts import RunningCounts, limit_reached
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.units import format_size

# A step hands over so many at most; the next one follows at once.
MOST_AT_ONCE = 2000
_ROUNDING = 1e-6


class DispatchView(Struct, frozen=True, kw_only=True):
    """`running` are all live attempts, here and elsewhere, and `live` how many each engine has. A lane in `refused` was
    just refused by its engine. `terms` are asked for only where a job may go."""

    now: float
    queues: Sequence[LaneQueue]
    offers: Mapping[str, Offer]
    live: Mapping[str, int]
    terms: Callable[[int], ClusterTerms]
    running: Sequence[RunningJob] = ()
    used: Mapping[Party, float] = {}
    shut: tuple[Reason, ...] = ()
    stopped: frozenset[str] = frozenset()
    tags: Mapping[str, int] = {}
    refused: Mapping[int, Reason] = {}


def hand_over(view: DispatchView, *, about: int | None = None) -> Plan:
    """`about` is a lane that is looked at however many there are."""
    return _Hander(view, about).plan()


class _Hander:
    def __init__(self, view: DispatchView, about: int | None) -> None:
        self._view = view
        self._counts = RunningCounts(view.running)
        self._live = dict(view.live)
        self._free = {name: offer.free for name, offer in view.offers.items()}
        self._full: dict[str, Reason] = {}
        self._starts: list[Start] = []
        self._holds: dict[int, WaitingJob] = {}
        self._line = QueueOrder(list(self._in_reach(view.queues)), view.used, view.now, explained_lane=about)

    def _in_reach(self, queues: Sequence[LaneQueue]) -> Iterator[LaneQueue]:
        """However many lanes wait for an engine that is in trouble, they hide none of another's."""
        for queue in queues:
            if self._offer(queue.lane).trouble is None:
                yield queue
            elif (first := next(queue.jobs, None)) is not None:
                self._hold(queue.lane, first, queue.lane.need, self._refuse(queue.lane))

    def plan(self) -> Plan:
        while (first := self._line.first()) is not None and len(self._starts) < MOST_AT_ONCE:
            self._consider(*first)
        return Plan(starts=tuple(self._starts), waiting=tuple(self._holds.values()))

    def _consider(self, lane: Lane, candidate: Candidate) -> None:
        refusal = self._refuse(lane)
        terms = None if refusal else self._view.terms(candidate.job_id)
        if terms is not None:
            refusal = self._take(lane, candidate, terms)
        if not refusal and terms is not None:
            self._start(lane, candidate, terms)
            return
        self._hold(lane, candidate, lane.need if terms is None else terms.need, refusal)
        self._line.drop(lane)

    def _hold(self, lane: Lane, candidate: Candidate, need: Need, why: tuple[Reason, ...]) -> None:
        self._holds.setdefault(lane.id, WaitingJob(job_id=candidate.job_id, lane=lane, need=need, reasons=why))

    def _start(self, lane: Lane, candidate: Candidate, terms: ClusterTerms) -> None:
        self._line.advance(lane)
        self._live[lane.engine] = self._live.get(lane.engine, 0) + 1
        self._counts.add(lane.tag, lane.group, lane.need.devices, takes_slot=False)
        self._starts.append(Start(job_id=candidate.job_id, lane=lane, claim=Claim(shares=()), terms=terms))

    def _offer(self, lane: Lane) -> Offer:
        return self._view.offers.get(lane.engine, Offer())

    def _refuse(self, lane: Lane) -> tuple[Reason, ...]:
        view, trouble = self._view, self._offer(lane).trouble
        if view.shut:
            return view.shut
        if trouble is not None:
            return (Reason(ReasonKind.NO_ENGINE, trouble),)
        if lane.tag in view.stopped:
            return (Reason(ReasonKind.PAUSED, "its workspace was stopped: `gpuyard workspace start` lets it go on"),)
        if lane.id in view.refused:
            return (view.refused[lane.id],)
        return self._refuse_by_number(lane)

    def _refuse_by_number(self, lane: Lane) -> tuple[Reason, ...]:
        offer, counts, most = self._offer(lane), self._counts, self._view.tags.get(lane.tag)
        if most is not None and counts.by_tag.get(lane.tag, 0) >= most:
            return (limit_reached(ReasonKind.TAG_LIMIT, f"jobs tagged '{lane.tag}'", most),)
        most = lane.group_limit
        if most is not None and counts.by_group.get(lane.group, 0) >= most:
            return (limit_reached(ReasonKind.ARRAY_LIMIT, "jobs of its array", most),)
        if offer.most_jobs is not None and self._live.get(lane.engine, 0) >= offer.most_jobs:
            return (limit_reached(ReasonKind.ENGINE_LIMIT, f"jobs on {lane.engine} (most_jobs)", offer.most_jobs),)
        return (self._full[lane.engine],) if lane.engine in self._full else ()

    def _take(self, lane: Lane, candidate: Candidate, terms: ClusterTerms) -> tuple[Reason, ...]:
        """From what is free there; a reason where that is not enough."""
        free = self._free.get(lane.engine)
        if free is None:
            return ()
        offer = self._view.offers[lane.engine]
        wanted = amount_of(terms, offer.card_mb)
        short = _shortage(lane.engine, free, wanted, "free")
        if short is None:
            self._free[lane.engine] = less(free, wanted)
            return ()
        never = None if offer.total is None else _shortage(lane.engine, offer.total, wanted, "in all")
        if never is not None:
            return (never,)  # to wait for what is not there is no reason to hold up others
        self._full[lane.engine] = Reason(
            ReasonKind.BEHIND, f"job {candidate.job_id} comes first, and there is no room for it on {lane.engine} yet"
        )
        return (short,)


def _shortage(engine: str, free: Amount, wanted: Amount, how: str) -> Reason | None:
    for what, had, needed in (
        ("GPUs", free.gpus, wanted.gpus or 0.0),
        ("CPUs", free.cpus, wanted.cpus or 0.0),
        ("of RAM", free.ram_mb, wanted.ram_mb or 0.0),
    ):
        if had is not None and needed > had + _ROUNDING:
            figures = (
                (format_size(max(0.0, had)), format_size(needed)) if what == "of RAM" else (f"{had:g}", f"{needed:g}")
            )
            text = f"{engine} has {figures[0]} {what} {how}, {figures[1]} needed"
            return Reason(kind=ReasonKind.NO_ROOM, text=text, had=had, needed=needed)
    return None
