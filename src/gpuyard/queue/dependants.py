"""Dependants: what the end of a job, or another attempt at it, means for the jobs that depend on it."""

import heapq
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from gpuyard.model.dependencies import WAS_HELD, DependencyOutlook, DependencyState, outlook_of_all, was_skipped
from gpuyard.model.job import Job
from gpuyard.model.lifecycle import FINISHED, JobEvent, JobState, can
from gpuyard.store.dependency_store import Dependant
from gpuyard.store.job_store import JobStore

# Dependants that one transaction settles or revives: a few milliseconds of work.
_AT_ONCE = 100
# Dependants of a job that are read at once.
_PAGE = 100


class Dependants:
    """Call its methods in a transaction: it settles `_AT_ONCE` dependants. The ended jobs with others are stored, for
    the next steps and daemons. No method recurses: a chain may be longer than Python's stack."""

    def __init__(self, store: JobStore, apply: Callable[..., JobState], apply_to_many: Callable[..., None]) -> None:
        """`apply` and `apply_to_many` change the states of these jobs, and of no other (`JobTransitions`)."""
        self._store, self._apply, self._apply_to_many = store, apply, apply_to_many
        self._open: dict[int, int] = {}  # ended jobs with the last of their dependants that was settled
        self._stored: set[int] = set()
        self.left = _AT_ONCE

    def reload(self) -> None:
        """Take over what the store has. Call it before the first transaction."""
        self._open = dict.fromkeys(self._store.unsettled(revives=False), 0)
        self._stored = set(self._open)

    def begin(self) -> None:
        """Call it at the start of each transaction."""
        self.left = _AT_ONCE

    @property
    def has_more(self) -> bool:
        """Whether ended jobs have dependants that are not settled yet."""
        return bool(self._open)

    @property
    def may_reject_ready(self) -> bool:
        """Whether queued jobs may still be rejected. No job starts meanwhile."""
        return any(self._store.may_reject_ready(job_id, after) for job_id, after in self._open.items())

    def settle(self, job_id: int, now: float) -> None:
        """Unblock jobs whose dependencies are met; reject those that can never start, and all that depend on them."""
        if self._store.has_dependencies:
            self._open[job_id] = 0
            self.settle_more(now)

    def settle_more(self, now: float) -> None:
        """Go on with what is not settled yet, as much as one transaction may do."""
        while self._open and self.left > 0:
            job_id, after = self._open.popitem()
            ended, most = self._store.states_of([job_id]).get(job_id), self.left
            found = self._store.dependants_after(job_id, after, most) if ended in FINISHED else []
            last = self._settle(found, ended, now) if found and ended is not None else after
            if found and (len(found) == most or last < found[-1].id):
                self._open[job_id] = last
            elif job_id in self._stored:
                self._stored.discard(job_id)
                self._store.drop_unsettled([job_id], revives=False)
        if new := self._open.keys() - self._stored:
            self._stored |= new
            self._store.add_unsettled(new, revives=False)

    def _settle(self, dependants: Sequence[Dependant], ended: JobState, now: float) -> int:
        """Settle dependants of a job, in order; return the last. They may be too much for this transaction."""
        waiting = {each.id: each for each in dependants if can(each.state, JobEvent.REJECT)}
        decided = sorted(self._store.may_decide(waiting.values(), ended))
        self.left -= len(dependants) - len(decided)
        for place in range(0, len(decided), 25):
            part = decided[place : place + 25]
            others = self._store.dependencies_of(part)
            self._decide([(waiting[job_id], others[job_id]) for job_id in part], now)
            self.left -= len(part) + sum(map(len, others.values())) // 10  # settling one costs as much as reading 10
            if self.left <= 0:
                return part[-1] if place + len(part) < len(decided) else dependants[-1].id
        return dependants[-1].id

    def _decide(self, dependants: Sequence[tuple[Dependant, list[DependencyState]]], now: float) -> None:
        free: list[int] = []
        lost: dict[str, list[int]] = {}  # by the reason
        for dependant, others in dependants:
            found, why = outlook_of_all(others)
            if found is DependencyOutlook.NEVER:
                was_held = WAS_HELD if dependant.state is JobState.HELD else ""
                lost.setdefault(f"{why}{was_held}", []).append(dependant.id)
            elif found is DependencyOutlook.MET and dependant.state is JobState.BLOCKED:
                if dependant.not_before is None or dependant.not_before <= now:
                    free.append(dependant.id)
                elif (job := self._store.job(dependant.id)) is not None:
                    self._apply(job, JobEvent.UNBLOCK, now)
        if free:
            self._apply_to_many(free, JobEvent.UNBLOCK, now)
        for reason, job_ids in lost.items():
            self._apply_to_many(job_ids, JobEvent.REJECT, now, reason)
            self._open.update(dict.fromkeys(self._store.with_dependants(job_ids), 0))

    def queue_or_block(self, job: Job, if_free: JobEvent, now: float) -> None:
        """Queue a job, block it if dependencies are pending, or reject it if they can never be met."""
        found, why = outlook_of_all(self._store.dependencies(job.id))
        state = self._apply(job, if_free if found is DependencyOutlook.MET else JobEvent.BLOCK, now)
        if found is DependencyOutlook.NEVER:
            self._apply(replace(job, state=state), JobEvent.REJECT, now, why)
            self.settle(job.id, now)

    def revive(self, job_id: int, now: float) -> bool:
        """Let a skipped job wait again; return False if it was not skipped, or can still not start."""
        job = self._store.job(job_id)
        if job is None or job.state is not JobState.REJECTED or not was_skipped(job.reason):
            return False
        if job.spec.task is not None and self._store.find_unfinished(job.spec.tag, job.spec.name or ""):
            return False  # a config of a workspace has one live job at most
        if self._store.has_lost_dependency(job_id):
            return False
        found, _ = outlook_of_all(self._store.dependencies(job_id))
        if found is DependencyOutlook.NEVER:
            return False
        state = self._apply(job, JobEvent.REQUEUE if found is DependencyOutlook.MET else JobEvent.BLOCK, now)
        self._store.reset_failures(job_id)
        if (job.reason or "").endswith(WAS_HELD):
            self._apply(replace(job, state=state), JobEvent.HOLD, now, "held until `gpuyard release`")
        return True


class Revival:
    """The jobs that wait again because jobs run again: those skipped because of them, and because of those in turn. A
    job depends on earlier jobs only, so dependants are decided in the order of their ids, and each once. A transaction
    decides some of very many. The jobs that run again with others are stored: the next daemon goes on."""

    def __init__(self, store: JobStore, dependants: Dependants) -> None:
        self._store, self._dependants = store, dependants
        self._undecided: list[tuple[int, int]] = []  # a heap of the next dependant of each source, with the source
        self._unread: dict[int, Iterator[int]] = {}  # the dependants after those, by source
        self._seen: set[int] = set()
        self._sources: set[int] = set()  # the jobs that run again, until all of `_undecided` are decided
        self._stored: set[int] = set()
        self.revived: set[int] = set()

    def add(self, job_id: int, among: Callable[[int], bool] = lambda _: True) -> None:
        """Note that a job runs again, in the order of ids. Only dependants `among` these are decided."""
        self._unread[job_id] = self._dependants_of(job_id, among)
        if self._read_next(job_id):
            self._sources.add(job_id)

    def _dependants_of(self, job_id: int, among: Callable[[int], bool]) -> Iterator[int]:
        """Yield the dependants of a job that were not yielded yet, by id; a page of them is read at a time."""
        page = self._store.dependants(job_id, limit=_PAGE)
        while page:
            for dependant in page:
                if dependant not in self._seen and among(dependant):
                    self._seen.add(dependant)
                    yield dependant
            page = self._store.dependants(job_id, after=page[-1], limit=_PAGE) if len(page) == _PAGE else []

    def _read_next(self, job_id: int) -> bool:
        """Add the next dependant of a source to the undecided ones; return whether there is one."""
        dependant = next(self._unread[job_id], None)
        if dependant is None:
            del self._unread[job_id]
            return False
        heapq.heappush(self._undecided, (dependant, job_id))
        return True

    def has_undecided(self, up_to: int | None = None) -> bool:
        """Whether dependants up to this id, or any, are not decided yet."""
        return bool(self._undecided) and (up_to is None or self._undecided[0][0] <= up_to)

    def decide(self, now: float, up_to: int | None = None) -> list[int]:
        """Decide dependants up to this id, or all, as many as one transaction may; return those that wait again."""
        revived: list[int] = []
        while self.has_undecided(up_to) and self._dependants.left > 0:
            job_id, source = heapq.heappop(self._undecided)
            self._read_next(source)
            self._dependants.left -= 3  # it costs as much as settling three
            if self._dependants.revive(job_id, now):
                revived.append(job_id)
                self.add(job_id)
        if up_to is None and not self._undecided:
            self._seen.clear()
            self._sources.clear()
        self.revived.update(revived)
        return revived

    def load(self) -> None:
        """Take over what requests and daemons before this one left undone."""
        self._stored.update(self._store.unsettled(revives=True))
        for job_id in sorted(self._stored):
            self.add(job_id)

    def store(self) -> None:
        """Store which jobs have dependants that are not decided yet. Call it at the end of a transaction."""
        if new := self._sources - self._stored if self._undecided else set():
            self._store.add_unsettled(new, revives=True)
            self._stored |= new
        if not self._undecided and self._stored:
            self._store.drop_unsettled(self._stored, revives=True)
            self._stored.clear()
