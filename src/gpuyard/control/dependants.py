"""Dependants: what the end of a job, or another attempt at it, means for the jobs that depend on it."""

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
            if self._store.still_waits_after(dependant_id, job_id):
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

    def revive(self, job_id: int, now: float) -> list[int]:
        """Let the jobs wait again that were skipped because of a job that runs again, and those skipped because of
        them; return their ids. A job that another dependency keeps from starting stays rejected."""
        revived: list[int] = []
        again = [job_id]
        while again:
            for dependant_id in self._store.dependants(again.pop()):
                dependant = self._store.job(dependant_id)
                if dependant is None or dependant.state is not JobState.REJECTED or not was_skipped(dependant.reason):
                    continue
                if dependant.spec.task is not None and self._store.find_unfinished(
                    dependant.spec.tag, dependant.spec.name or ""
                ):
                    continue  # a config of a workspace has one live job at most
                if self._store.has_lost_dependency(dependant_id):
                    continue
                if outlook_of_all(self._store.dependencies(dependant_id))[0] is DependencyOutlook.NEVER:
                    continue
                self._revive(dependant, now)
                revived.append(dependant_id)
                again.append(dependant_id)
        return sorted(revived)

    def _revive(self, job: Job, now: float) -> None:
        self.queue_or_block(job, JobEvent.REQUEUE, now)
        self._store.reset_failures(job.id)
        if (job.reason or "").endswith(WAS_HELD):
            state = self._store.state_of(job.id)
            self._apply(replace(job, state=state), JobEvent.HOLD, now, "held until `gpuyard release`")
