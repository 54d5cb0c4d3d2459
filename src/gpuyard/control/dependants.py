"""Dependants: what the end of a job, or another attempt at it, means for the jobs that depend on it."""

import heapq
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from gpuyard.core.job.dependencies import WAS_HELD, DependencyOutlook, outlook_of_all, was_skipped
from gpuyard.core.job.job import Job
from gpuyard.core.job.lifecycle import FINISHED, JobEvent, JobState, can
from gpuyard.store.job_store import JobStore


class ApplyEvent(Protocol):
    def __call__(self, job: Job, event: JobEvent, now: float, reason: str | None = None) -> JobState:
        """Change the state of a job without a live attempt, and of no other job."""


class Dependants:
    """Call its methods in a transaction. None recurses: a chain may be longer than Python's stack."""

    def __init__(self, store: JobStore, apply: ApplyEvent) -> None:
        self._store = store
        self._apply = apply

    def settle(self, job_id: int, now: float) -> None:
        """Unblock jobs whose dependencies are met; reject those that can never start, and all that depend on them."""
        ended = [job_id]
        while ended:
            ended += self._settle(ended.pop(), now)

    def _settle(self, job_id: int, now: float) -> list[int]:
        """Settle the direct dependants; return the jobs that were rejected."""
        dependants = self._store.dependants(job_id)
        if not dependants or self._store.state_of(job_id) not in FINISHED:
            return []
        rejected = []
        for dependant_id in dependants:
            dependant = self._store.job(dependant_id)
            if dependant is None or not can(dependant.state, JobEvent.REJECT):
                continue
            is_blocked = dependant.state is JobState.BLOCKED
            if not self._store.may_decide(dependant_id, job_id, is_blocked=is_blocked):
                continue
            found, why = outlook_of_all(self._store.dependencies(dependant_id))
            if found is DependencyOutlook.NEVER:
                was_held = WAS_HELD if dependant.state is JobState.HELD else ""
                self._apply(dependant, JobEvent.REJECT, now, f"{why}{was_held}")
                rejected.append(dependant_id)
            elif found is DependencyOutlook.MET and dependant.state is JobState.BLOCKED:
                self._apply(dependant, JobEvent.UNBLOCK, now)
        return rejected

    def queue_or_block(self, job: Job, if_free: JobEvent, now: float) -> None:
        """Queue a job, block it if dependencies are pending, or reject it if they can never be met."""
        found, why = outlook_of_all(self._store.dependencies(job.id))
        state = self._apply(job, if_free if found is DependencyOutlook.MET else JobEvent.BLOCK, now)
        if found is DependencyOutlook.NEVER:
            self._apply(replace(job, state=state), JobEvent.REJECT, now, why)
            self.settle(job.id, now)

    def revive(self, job_id: int, now: float) -> bool:
        """Let a job wait again that was skipped; return False if it was not, or if its dependencies still keep it from
        starting."""
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
    """The jobs that wait again because jobs run again: those skipped because of them, and because of those in turn.

    A job depends on earlier jobs only. Dependants are therefore decided in the order of their ids, and each is decided
    once, however many of its dependencies run again.
    """

    def __init__(self, store: JobStore, dependants: Dependants) -> None:
        self._store = store
        self._dependants = dependants
        self._undecided: list[int] = []  # a heap
        self._seen: set[int] = set()
        self.revived: set[int] = set()

    def add(self, job_id: int, among: Callable[[int], bool] = lambda _: True) -> None:
        """Note that a job runs again: those of one transaction in the order of their ids. Only dependants for which
        `among` is true are decided."""
        for dependant in self._store.dependants(job_id):
            if dependant not in self._seen and among(dependant):
                self._seen.add(dependant)
                heapq.heappush(self._undecided, dependant)

    def decide(self, now: float, up_to: int | None = None) -> list[int]:
        """Decide dependants up to this id, below which no more jobs are added, or all before the end of a transaction;
        return those that wait again."""
        revived: list[int] = []
        while self._undecided and (up_to is None or self._undecided[0] <= up_to):
            job_id = heapq.heappop(self._undecided)
            if self._dependants.revive(job_id, now):
                revived.append(job_id)
                self.add(job_id)
        if up_to is None:
            self._seen.clear()
        self.revived.update(revived)
        return revived
