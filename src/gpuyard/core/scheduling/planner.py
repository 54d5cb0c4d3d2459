"""decide(view) -> Plan: which jobs start or go on now and where, who makes room, and in the policy's own words why the
others do not.

The first job in the line that needs devices and cannot have them is the head of the queue. Every device that would
serve it is kept for it, or, where it is known how long all that runs takes and it has not waited for long, those that
will be free for it first. A job behind it may start only where that cannot delay it: on devices that the head cannot
use, or, where it is known how long things take, if it is sure to be over before the head could start anyway. One whom
the end of all leases would not help holds up nobody, nor does one that waits for others of its tag or array. Work
without devices has slots of its own and waits behind no device.

The runs of a batch start one at a time, as its gates allow; one that waits for a gate holds up nobody. A batch says
itself how many run at once, so it takes no slots. Nor does one hold up anybody that waits for others of its crew.

Jobs that were suspended for want of room stand in the same line. A head that may preempt has the cheapest jobs of
lower priority make room for it; while they do, it waits, and nobody else is asked.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.cluster.offer import ClusterTerms
from gpuyard.core.lease import Claim, Holder, Need, Ticket
from gpuyard.core.memory.estimates import Estimate
from gpuyard.core.scheduling.batch_pacing import PaceState, device_refusal, refusals, watched_refusals
from gpuyard.core.scheduling.device_fit import host_refusals
from gpuyard.core.scheduling.placement import PlacementState, PlacementView, in_line
from gpuyard.core.scheduling.preemption import RunningJob, find_victims
from gpuyard.core.scheduling.queue_order import Candidate, Lane, LaneQueue, Party, QueueLine
from gpuyard.core.scheduling.running_counts import Counts, limit_reached
from gpuyard.core.scheduling.tag_sharing import anywhere, emptiest, spread
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind, plain

# So many jobs of a lane are looked at whose needs differ, before it is given up for this time.
LOOK_AHEAD = 64
# A head that has waited so long is kept every device that would serve it, not only the one that seems to be free first.
STRICT_AFTER_S = 1800.0


class SchedulingLimits(Struct, frozen=True, kw_only=True):
    """How many at once: jobs without devices, and jobs of a tag."""

    cpu_jobs: int
    tags: dict[str, int] = {}


class PlannerView(Struct, frozen=True, kw_only=True):
    """Everything the policy goes by. `shut` are reasons for which nothing at all may start now.

    `estimate` says how long a job takes, `ends_after` the earliest time at which a running one may be over and
    `ends_about` the likely one, and `need` what a job needs whose lane leaves that open; all are asked only where it
    matters. `standings` are those of batches, by their group. Nothing of a tag in `stopped` starts; `last_starts` says
    when one of a crew last did, by its tag.
    """

    now: float
    placement: PlacementView
    queues: Sequence[LaneQueue]
    me: Holder
    limits: SchedulingLimits
    running: Sequence[RunningJob] = ()
    used: Mapping[Party, float] = {}
    shut: tuple[Reason, ...] = ()
    tickets: tuple[Ticket, ...] = ()
    my_ticket: Ticket | None = None
    estimate: Callable[[int], Estimate] = lambda _: Estimate()
    ends_after: Callable[[int], float | None] = lambda _: None
    ends_about: Callable[[int], float | None] = lambda _: None
    need: Callable[[Lane, int], Need] = lambda lane, _: lane.need
    standings: Mapping[int, PaceState] = {}
    stopped: frozenset[str] = frozenset()
    last_starts: Mapping[str, float] = {}


class Start(Struct, frozen=True, kw_only=True):
    """A proposal: the ledger grants it, or it turns into a Hold. In a lane that resumes, the job goes on.

    For a run of a batch, `charged_mb` is what is used and reserved of its device with it. On `terms` it is handed over
    to an engine that places it."""

    job_id: int
    lane: Lane
    claim: Claim
    charged_mb: float | None = None
    terms: ClusterTerms | None = None


class Hold(Struct, frozen=True, kw_only=True):
    job_id: int
    lane: Lane
    need: Need
    reasons: tuple[Reason, ...]


class Preempt(Struct, frozen=True, kw_only=True):
    """A running job that is to make room for another."""

    job_id: int
    for_job: int


class Plan(Struct, frozen=True, kw_only=True):
    """`holds` has one for each lane that was looked at, its first job's.

    `head` is the one that others wait for; where nobody has to, the first that waits for devices.
    """

    starts: tuple[Start, ...] = ()
    holds: tuple[Hold, ...] = ()
    preempts: tuple[Preempt, ...] = ()
    head: Hold | None = None


Refusal: TypeAlias = tuple[Reason, ...]


def decide(view: PlannerView, *, about: int | None = None) -> Plan:
    """`about` is a lane whose reasons are wanted in full, even where there is no room for anybody."""
    return _Planner(view, about).plan()


class _Planner:
    def __init__(self, view: PlannerView, about: int | None) -> None:
        self._view = view
        self._about = about
        self._line = QueueLine(view.queues, view.used, view.now, about=about)
        self._kept_for_head: PlacementState | None = None
        self._tickets = in_line(view.tickets)
        self._counts = Counts(view.running)
        ours = {run.lease_id for run in view.running}
        leases = view.placement.leases
        self._all_is_ours = bool(leases) and not view.tickets and all(lease.id in ours for lease in leases)
        self._head: Hold | None = None
        self._first_waiting: Hold | None = None
        self._shadow: float | None = None
        self._starts: list[Start] = []
        self._holds: dict[int, Hold] = {}
        self._preempts: tuple[Preempt, ...] = ()
        self._looked_at: dict[int, int] = {}
        self._unplaceable: set[Need] = set()
        self._has_paced = False
        self._last_starts = dict(view.last_starts)

    @cached_property
    def _board(self) -> PlacementState:
        """Who has what, with what this plan starts; made when the first asks for a device."""
        return PlacementState(self._view.placement)

    @property
    def _kept(self) -> PlacementState:
        """The same, with what is kept for the head."""
        return self._kept_for_head or self._board

    def plan(self) -> Plan:
        while (first := self._line.first()) is not None:
            self._consider(*first)
        return Plan(
            starts=tuple(self._starts),
            holds=tuple(self._holds.values()),
            preempts=self._preempts,
            head=self._head or self._first_waiting,
        )

    def _consider(self, lane: Lane, candidate: Candidate) -> None:
        refusal = self._refuse(lane)
        need = lane.need if refusal or not lane.sizes_each else self._view.need(lane, candidate.job_id)
        ways: Sequence[Need] = (need,)
        if need.devices and not refusal:
            if lane.pace is not None:
                need, refusal = self._narrow(lane, need)
                ways = (need,)
            elif lane.crew is not None:
                ways, refusal = self._spread(lane, need)
                need = anywhere(ways) if ways else need
        refusal = refusal or self._refuse_too_soon(lane)
        choice = refusal or self._place(lane, need, ways, candidate)
        if isinstance(choice, Claim):
            self._start(lane, candidate, choice)
            return
        hold = self._hold(lane, need, candidate, choice)
        if self._head is None and need.devices and not refusal:
            self._make_head(hold, candidate)
        looked_at = self._looked_at[lane.id] = self._looked_at.get(lane.id, 0) + 1
        if lane.sizes_each and not refusal and looked_at < LOOK_AHEAD and self._board.has_room():
            self._line.pass_over(lane)
        else:
            self._line.drop(lane)

    def _hold(self, lane: Lane, need: Need, candidate: Candidate, why: Refusal) -> Hold:
        hold = Hold(job_id=candidate.job_id, lane=lane, need=need, reasons=why)
        self._holds.setdefault(lane.id, hold)
        return hold

    def _start(self, lane: Lane, candidate: Candidate, claim: Claim) -> None:
        self._line.advance(lane)
        self._starts.append(
            Start(job_id=candidate.job_id, lane=lane, claim=claim, charged_mb=self._charged_mb(lane, claim))
        )
        if not lane.resumes:  # it counts as running already
            self._counts.add(lane.tag, lane.group, lane.need.devices, takes_slot=lane.pace is None)
            self._counts.place(lane.tag, (share.device_id for share in claim.shares))
            self._last_starts[lane.tag] = self._view.now
        self._has_paced = self._has_paced or lane.pace is not None
        for board in self._boards() if claim.shares else ():
            board.take(claim, self._holder(candidate.job_id), _name(candidate.job_id))

    def _boards(self) -> Iterator[PlacementState]:
        yield self._board
        if self._kept_for_head is not None:
            yield self._kept_for_head

    def _charged_mb(self, lane: Lane, claim: Claim) -> float | None:
        if lane.pace is None or not claim.shares:
            return None
        share = claim.shares[0]
        charged = self._board.rooms[share.device_id].charged_mb
        return None if charged is None else charged + (share.memory_mb or 0.0)

    def _refuse(self, lane: Lane) -> Refusal:  # noqa: PLR0911 - one for each
        """What stands against the whole lane, wherever it would go."""
        if lane.resumes:  # it counts as running already, and what runs goes on when the queue is paused
            return tuple(reason for reason in self._view.shut if reason.kind is not ReasonKind.PAUSED)
        if self._view.shut:
            return self._view.shut
        if lane.tag in self._view.stopped:
            return (plain(ReasonKind.PAUSED, "its workspace was stopped: `gpuyard workspace start` lets it go on"),)
        limits, counts = self._view.limits, self._counts
        most = limits.tags.get(lane.tag)
        if most is not None and counts.tags.get(lane.tag, 0) >= most:
            return (limit_reached(ReasonKind.TAG_LIMIT, f"jobs tagged '{lane.tag}'", most),)
        if lane.group_limit is not None and counts.groups.get(lane.group, 0) >= lane.group_limit:
            what = "jobs of its array" if lane.pace is None else "runs of its batch"
            return (limit_reached(ReasonKind.ARRAY_LIMIT, what, lane.group_limit),)
        if lane.pace is not None:
            return self._refuse_run(lane)
        if not lane.need.devices and counts.without_devices >= limits.cpu_jobs:
            return (limit_reached(ReasonKind.CPU_LIMIT, "jobs without a GPU", limits.cpu_jobs),)
        return ()

    def _refuse_run(self, lane: Lane) -> Refusal:
        assert lane.pace is not None
        assert lane.group is not None
        if self._has_paced:
            return (plain(ReasonKind.STAGGERED, "another run starts at this moment"),)
        standing, now = self._view.standings.get(lane.group, PaceState()), self._view.now
        watched = () if lane.need.devices else watched_refusals(lane.pace, standing, lane.need, now)
        return (*refusals(lane.pace, standing, now), *watched)

    def _narrow(self, lane: Lane, need: Need) -> tuple[Need, Refusal]:
        """What it needs, on those devices alone that its batch's gates leave it; where they leave none, why."""
        assert lane.pace is not None
        assert lane.group is not None
        need = replace(need, ignores_foreign_load=lane.pace.max_gpu_percent is not None)
        standing = self._view.standings.get(lane.group, PaceState())
        rooms = list(self._board.could_do(need))
        closed = {room.device.id: device_refusal(lane.pace, standing, room, need, self._view.now) for room in rooms}
        left = tuple(device_id for device_id, why in closed.items() if why is None)
        if len(left) < need.devices <= len(rooms):
            return need, tuple(why for why in closed.values() if why is not None)
        return (replace(need, only=left) if len(left) < len(rooms) else need), ()

    def _refuse_too_soon(self, lane: Lane) -> Refusal:
        """Some time passes between two of a crew."""
        if lane.crew is None:
            return ()
        last, now = self._last_starts.get(lane.tag, -math.inf), self._view.now
        if not last <= now < last + lane.crew.stagger_s:  # a clock that was set back is waited for by nobody
            return ()
        return (plain(ReasonKind.STAGGERED, f"the next one may start in {last + lane.crew.stagger_s - now:.1f} s"),)

    def _spread(self, lane: Lane, need: Need) -> tuple[Sequence[Need], Refusal]:
        assert lane.crew is not None
        rooms = list(self._board.could_do(need))
        if len(rooms) < need.devices:
            return (need,), ()
        on = self._counts.on.setdefault(lane.tag, {})
        ways = spread(need, lane.crew, rooms, on)
        if ways:
            return ways, ()
        if need.devices > 1:  # its places are kept for it, or those that need one would take each as it comes
            for device_id in emptiest(rooms, on, need.devices):
                on[device_id] = lane.crew.most_per_device
        return (), (
            limit_reached(ReasonKind.TAG_LIMIT, "tasks of its workspace on one GPU", lane.crew.most_per_device),
        )

    def _place(self, lane: Lane, need: Need, ways: Sequence[Need], candidate: Candidate) -> Claim | Refusal:
        if not need.devices:
            return tuple(host_refusals(need, self._view.placement.snapshot.host)) or Claim(shares=())
        if lane.id != self._about and (self._head or self._all_is_ours) and not self._board.has_room():
            return ()  # one who asks why is told; to find the words at each step would cost more than the step
        self._keep_for_those_ahead(lane)
        for way in ways:
            claim = self._find(way, candidate)
            if claim is not None:
                return claim
        is_asked = lane.id == self._about or lane.id not in self._holds
        return tuple(self._kept.explain(need)) if is_asked else ()

    def _find(self, need: Need, candidate: Candidate) -> Claim | None:
        """What was refused once in a plan is refused ever after: the board only fills."""
        if need not in self._unplaceable:
            claim = self._kept.find(need)
            if claim is not None:
                return claim
            self._unplaceable.add(need)
        if self._head is not None and self._ends_before_head(candidate):
            return self._board.find(need)
        return None

    def _keep_for_those_ahead(self, lane: Lane) -> None:
        """Whoever waits in the ledger's line before us, be it another user or a script, is served before us."""
        mine = self._view.my_ticket
        place = (-lane.priority, mine.since if mine else float("inf"))
        while self._tickets and (-self._tickets[0].priority, self._tickets[0].since) < place:
            ticket = self._tickets.pop(0)
            for board in self._boards():
                board.keep_for(ticket)

    def _make_head(self, hold: Hold, candidate: Candidate) -> None:
        self._first_waiting = self._first_waiting or hold
        if hold.lane.preempts:
            self._make_room(hold)
        if not self._board.has_room():
            self._head = hold  # nothing is left that could be kept for it
            return
        kept = self._board.copy()
        is_strict = hold.lane.preempts or self._view.now - candidate.queued_at > STRICT_AFTER_S
        if kept.reserve(hold.need, self._holder(hold.job_id), None if is_strict else self._likely_ends()):
            self._head, self._kept_for_head = hold, kept

    def _make_room(self, hold: Hold) -> None:
        """The cheapest that can be asked to leave; nobody, where enough are leaving already."""
        victims = find_victims(hold.need, self._board, self._view.running, hold.lane.priority)
        self._preempts = tuple(Preempt(job_id=run.job_id, for_job=hold.job_id) for run in victims)

    def _ends_before_head(self, candidate: Candidate) -> bool:
        most_s = self._view.estimate(candidate.job_id).most_s
        if most_s is None:
            return False
        if self._shadow is None:
            self._shadow = self._earliest_for_head()
        return self._view.now + most_s <= self._shadow

    def _earliest_for_head(self) -> float:
        """When the head could start at the earliest: of what nobody knows the end, the end may come at any moment."""
        assert self._head is not None
        view, need = self._view, self._head.need
        ends = {
            run.lease_id: max(view.now, view.ends_after(run.job_id) or view.now)
            for run in view.running
            if run.lease_id is not None
        }
        # Those that start with this plan have no leases yet; they too may make room for it.
        ends |= {_name(start.job_id): view.now + (view.estimate(start.job_id).least_s or 0.0) for start in self._starts}
        first = self._board.first_free(need, ends)
        return first[-1][0] if len(first) == need.devices else view.now

    def _likely_ends(self) -> dict[str, float] | None:
        """When leases should end; `None` where that is not known of all."""
        view = self._view
        ends = {run.lease_id: view.ends_about(run.job_id) for run in view.running}
        known = {lease.id: ends.get(lease.id) for lease in view.placement.leases}
        for start in self._starts:
            likely_s = view.estimate(start.job_id).likely_s
            known[_name(start.job_id)] = None if likely_s is None else view.now + likely_s
        told = {lease_id: max(view.now, at) for lease_id, at in known.items() if at is not None}
        return told if len(told) == len(known) else None

    def _holder(self, job_id: int) -> Holder:
        return replace(self._view.me, label=_name(job_id))


def _name(job_id: int) -> str:
    return f"job {job_id}"


def estimate_start(view: PlannerView, lane: Lane, ahead: int, likely_s: float | None) -> float | None:
    """Roughly when a job with so many before it could start, each taking `likely_s`; `None` where nothing is known."""
    mine = [run for run in view.running if (run.devices if lane.need.devices else run.takes_slot and not run.devices)]
    known = (view.ends_after(run.job_id) for run in mine)
    ends = sorted(max(view.now, end) for end in known if end is not None)
    if not ends or len(ends) < len(mine) or (ahead >= len(ends) and likely_s is None):
        return None
    return ends[ahead % len(ends)] + (ahead // len(ends)) * (likely_s or 0.0)
