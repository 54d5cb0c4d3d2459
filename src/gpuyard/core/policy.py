"""decide(view) -> Plan: which jobs start now and where, and in the policy's own words why the others do not.

The first job in the line that needs devices and cannot have them is the head of the queue. Every device that would
serve it is kept for it; a job behind it may start only where that cannot delay it: on devices that the head cannot use,
or, where it is known how long things take, if it is sure to be over before the head could start anyway. One whom the
end of all leases would not help holds up nobody, nor does one that waits for others of its tag or array. Work without
devices has slots of its own and waits behind no device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.learning import Estimate
from gpuyard.core.model import Claim, Holder, Ticket
from gpuyard.core.ordering import Candidate, Lane, LaneQueue, Line, Party
from gpuyard.core.placement import Board, in_line
from gpuyard.core.placement import View as Placement
from gpuyard.core.reasons import Reason, ReasonKind


class Limits(Struct, frozen=True, kw_only=True):
    """How many at once: jobs without devices, and jobs of a tag."""

    cpu_jobs: int
    tags: dict[str, int] = {}


class Running(Struct, frozen=True, kw_only=True):
    """A live attempt."""

    job_id: int
    user: str
    tag: str
    devices: int
    started_at: float
    group: int | None = None
    lease_id: str | None = None


class View(Struct, frozen=True, kw_only=True):
    """Everything the policy goes by. `shut` are reasons for which nothing at all may start now.

    `estimate` says how long a job takes, and `ends_after` the earliest time at which a running one may be over; both
    are asked only where it matters.
    """

    now: float
    placement: Placement
    queues: Sequence[LaneQueue]
    me: Holder
    limits: Limits
    running: Sequence[Running] = ()
    used: Mapping[Party, float] = {}
    shut: tuple[Reason, ...] = ()
    tickets: tuple[Ticket, ...] = ()
    my_ticket: Ticket | None = None
    estimate: Callable[[int], Estimate] = lambda _: Estimate()
    ends_after: Callable[[int], float | None] = lambda _: None


class Start(Struct, frozen=True, kw_only=True):
    """A proposal: the ledger grants it, or it turns into a Hold."""

    job_id: int
    lane: Lane
    claim: Claim


class Hold(Struct, frozen=True, kw_only=True):
    job_id: int
    lane: Lane
    reasons: tuple[Reason, ...]


class Plan(Struct, frozen=True, kw_only=True):
    """`holds` has one for each lane that was looked at, its first job's.

    `head` is the one that others wait for; where nobody has to, the first that waits for devices.
    """

    starts: tuple[Start, ...] = ()
    holds: tuple[Hold, ...] = ()
    head: Hold | None = None


Refusal: TypeAlias = tuple[Reason, ...]


def decide(view: View, *, about: int | None = None) -> Plan:
    """`about` is a lane whose reasons are wanted in full, even where there is no room for anybody."""
    return _Planner(view, about).plan()


class _Planner:
    def __init__(self, view: View, about: int | None) -> None:
        self._view = view
        self._about = about
        self._line = Line(view.queues, view.used, view.now, about=about)
        self._board = Board(view.placement)
        self._kept = self._board
        self._tickets = in_line(view.tickets)
        self._counts = _Counts(view.running)
        ours = {run.lease_id for run in view.running}
        leases = view.placement.leases
        self._all_is_ours = bool(leases) and not view.tickets and all(lease.id in ours for lease in leases)
        self._head: Hold | None = None
        self._first_waiting: Hold | None = None
        self._shadow: float | None = None
        self._starts: list[Start] = []
        self._holds: list[Hold] = []

    def plan(self) -> Plan:
        while (first := self._line.first()) is not None:
            self._consider(*first)
        head = self._head or self._first_waiting
        return Plan(starts=tuple(self._starts), holds=tuple(self._holds), head=head)

    def _consider(self, lane: Lane, candidate: Candidate) -> None:
        refusal = self._refuse(lane)
        choice = refusal or self._place(lane, candidate)
        if isinstance(choice, Claim):
            self._start(lane, candidate, choice)
            return
        self._line.drop(lane)
        hold = Hold(job_id=candidate.job_id, lane=lane, reasons=choice)
        self._holds.append(hold)
        if self._head is None and lane.need.devices and not refusal:
            self._make_head(hold)

    def _start(self, lane: Lane, candidate: Candidate, claim: Claim) -> None:
        self._line.advance(lane)
        self._starts.append(Start(job_id=candidate.job_id, lane=lane, claim=claim))
        self._counts.add(lane.tag, lane.group, lane.need.devices)
        for board in {id(board): board for board in (self._board, self._kept)}.values():
            board.take(claim, self._holder(candidate.job_id))

    def _refuse(self, lane: Lane) -> Refusal:
        """What stands against the whole lane, wherever it would go."""
        if self._view.shut:
            return self._view.shut
        limits, counts = self._view.limits, self._counts
        most = limits.tags.get(lane.tag)
        if most is not None and counts.tags.get(lane.tag, 0) >= most:
            return (_limit(ReasonKind.TAG_LIMIT, f"jobs tagged '{lane.tag}'", most),)
        if lane.group_limit is not None and counts.groups.get(lane.group, 0) >= lane.group_limit:
            return (_limit(ReasonKind.ARRAY_LIMIT, "jobs of its array", lane.group_limit),)
        if not lane.need.devices and counts.without_devices >= limits.cpu_jobs:
            return (_limit(ReasonKind.CPU_LIMIT, "jobs without a GPU", limits.cpu_jobs),)
        return ()

    def _place(self, lane: Lane, candidate: Candidate) -> Claim | Refusal:
        need = lane.need
        if not need.devices:
            choice = self._board.choose(need)
            return choice.claim or choice.reasons
        if lane.id != self._about and (self._head or self._all_is_ours) and not self._board.has_room():
            return ()  # one who asks why is told; to find the words at each step would cost more than the step
        self._keep_for_those_ahead(lane)
        choice = self._kept.choose(need)
        if choice.claim is None and self._head is not None and self._ends_before_head(candidate):
            return self._board.choose(need).claim or choice.reasons
        return choice.claim or choice.reasons

    def _keep_for_those_ahead(self, lane: Lane) -> None:
        """Whoever waits in the ledger's line before us, be it another user or a script, is served before us."""
        mine = self._view.my_ticket
        place = (-lane.priority, mine.since if mine else float("inf"))
        while self._tickets and (-self._tickets[0].priority, self._tickets[0].since) < place:
            ticket = self._tickets.pop(0)
            for board in {id(board): board for board in (self._board, self._kept)}.values():
                board.keep_for(ticket)

    def _make_head(self, hold: Hold) -> None:
        self._first_waiting = self._first_waiting or hold
        if not self._board.has_room():
            self._head = hold  # nothing is left that could be kept for it
            return
        kept = self._board.copy()
        if kept.reserve(hold.lane.need, self._holder(hold.job_id)):
            self._head, self._kept = hold, kept

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
        view, need = self._view, self._head.lane.need
        known = {run.lease_id: view.ends_after(run.job_id) for run in view.running}
        ends = [(max(view.now, known.get(lease.id) or view.now), lease.id) for lease in view.placement.leases]
        # Those that start with this plan have no leases yet; they too may make room for it.
        starting = {f"job {start.job_id}": start for start in self._starts}
        ends += [(view.now + (view.estimate(start.job_id).least_s or 0.0), name) for name, start in starting.items()]
        gone = set[str]()
        for end, name in sorted(ends):
            gone.add(name)
            board = self._board.without(frozenset(gone))
            for start in (start for name, start in starting.items() if name not in gone):
                board.take(start.claim, self._holder(start.job_id))
            if board.choose(need).claim is not None:
                return end
        return view.now

    def _holder(self, job_id: int) -> Holder:
        return replace(self._view.me, label=f"job {job_id}")


class _Counts:
    """How many run already, the starts of this plan included."""

    def __init__(self, running: Sequence[Running]) -> None:
        self.tags: dict[str, int] = {}
        self.groups: dict[int | None, int] = {}
        self.without_devices = 0
        for run in running:
            self.add(run.tag, run.group, run.devices)

    def add(self, tag: str, group: int | None, devices: int) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.groups[group] = self.groups.get(group, 0) + 1
        self.without_devices += not devices


def _limit(kind: ReasonKind, what: str, most: int) -> Reason:
    text = f"{most} {what} may run at once, and as many do" if most else f"{what} may not run now: their limit is 0"
    return Reason(kind=kind, text=text, had=float(most), needed=float(most))


def estimate_start(view: View, lane: Lane, ahead: int, likely_s: float | None) -> float | None:
    """Roughly when a job with so many before it could start, each taking `likely_s`; `None` where nothing is known."""
    mine = [run for run in view.running if bool(run.devices) == bool(lane.need.devices)]
    known = (view.ends_after(run.job_id) for run in mine)
    ends = sorted(max(view.now, end) for end in known if end is not None)
    if not ends or len(ends) < len(mine) or (ahead >= len(ends) and likely_s is None):
        return None
    return ends[ahead % len(ends)] + (ahead // len(ends)) * (likely_s or 0.0)
