"""The controller's desk: what is known of live jobs and of use, kept in step with the store.

Everything here can be made anew from the store; whoever fails in the middle of a change calls `reload`.
"""

import contextlib
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.dependencies import Prospect, prospect_of_all
from gpuyard.core.jobs import Attempt, Job, Outcome, OutcomeKind
from gpuyard.core.learning import Durations, Estimate, estimate, fingerprints, learn
from gpuyard.core.lifecycle import FINISHED, JobEvent, JobState, advance, can
from gpuyard.core.ordering import Party, Use, add_use, weight
from gpuyard.core.policy import Running
from gpuyard.core.retry import Verdict, judge
from gpuyard.errors import EnvironmentFault
from gpuyard.store.jobs import JobStore

_NOTE_EVERY_S = 1.0
_STATE_AFTER_STOP = {OutcomeKind.CANCELLED: "cancelled", OutcomeKind.TIMED_OUT: "over its time limit"}


class Live(Struct, frozen=True, kw_only=True):
    job: Job
    attempt: Attempt


class Desk:
    """All changes of jobs go through here, inside a transaction of the store's."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self.live: dict[int, Live] = {}
        self.uses: dict[Party, Use] = {}
        self.finished = 0
        self.ended_logs: list[tuple[str, float]] = []
        self._learned: dict[str, Durations] = {}
        self._noted_at = 0.0

    def reload(self) -> None:
        self.live = {job.id: Live(job=job, attempt=attempt) for job, attempt in self.store.live()}
        self.uses = self.store.uses()

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Around a transaction: where that fails, nothing of it has happened here either."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(EnvironmentFault):
                self.reload()
            raise

    # Attempts

    def begin(self, job: Job, attempt: Attempt) -> None:
        self.store.begin_attempt(attempt)
        job = replace(job, state=advance(job.state, JobEvent.START), attempts=attempt.number)
        self.live[job.id] = Live(job=job, attempt=attempt)

    def stop(self, job_id: int, kind: OutcomeKind, now: float) -> Live:
        """Notes that it was asked to stop, and when it will be made to."""
        live = self.live[job_id]
        attempt = replace(live.attempt, stopping=kind, kill_at=now + live.job.spec.grace_s)
        state = advance(live.job.state, JobEvent.STOP)
        self.store.set_stop(attempt)
        self.store.change(job_id, state, reason=f"stopping: {_STATE_AFTER_STOP[kind]}")
        self.store.tell(job_id, now, "stopping", _STATE_AFTER_STOP[kind])
        self.live[job_id] = Live(job=replace(live.job, state=state), attempt=attempt)
        return self.live[job_id]

    def postpone_kill(self, job_id: int, kill_at: float) -> None:
        live = self.live[job_id]
        attempt = replace(live.attempt, kill_at=kill_at)
        self.store.set_stop(attempt)
        self.live[job_id] = Live(job=live.job, attempt=attempt)

    def end(
        self, job_id: int, outcome: Outcome, now: float, *, verdict: Verdict | None = None, pid: int | None = None
    ) -> None:
        """Records how the live attempt ended, and what becomes of its job; `pid` was the program's."""
        live = self.live.pop(job_id)
        job, attempt = live.job, live.attempt
        if attempt.log is not None:
            self.ended_logs.append((attempt.log, job.spec.log_cap_mb))
        if attempt.stopping is not None:
            outcome = replace(outcome, kind=attempt.stopping, reason=_STATE_AFTER_STOP[attempt.stopping])
        if outcome.kind is OutcomeKind.UNBEGUN:
            self.store.drop_attempt(job_id, attempt.number)
        else:
            self.store.end_attempt(job_id, attempt.number, outcome, now, pid)
            self._charge(job, attempt, now)
        if outcome.kind is OutcomeKind.SUCCEEDED:
            self._learn(job, now - attempt.started_at)
        self._follow(job, outcome, verdict or judge(job, outcome), now)

    def _follow(self, job: Job, outcome: Outcome, verdict: Verdict, now: float) -> None:
        state = advance(job.state, verdict.event)
        self.store.change(
            job.id,
            state,
            reason=None if state is JobState.SUCCEEDED else verdict.text,
            due_at=now + verdict.delay_s if state is JobState.DELAYED else None,
            ended_at=now if state in FINISHED else None,
            outcome=outcome,
            failures=job.failures + verdict.counts,
            queued_at=now if state is JobState.QUEUED else None,
        )
        if state is not JobState.SUCCEEDED:  # the attempt tells that by itself
            self.store.tell(job.id, now, state, verdict.text)
        if state in FINISHED:
            self.finished += 1
            self.settle_dependants(job.id, now)

    # Jobs that wait

    def apply(self, job: Job, event: JobEvent, now: float, reason: str | None = None) -> JobState:
        """Moves a job that has no live attempt; UserError where that cannot be."""
        state = self._move(job, event, now, reason)
        if state in FINISHED:
            self.settle_dependants(job.id, now)
        return state

    def _move(self, job: Job, event: JobEvent, now: float, reason: str | None) -> JobState:
        state = advance(job.state, event)
        is_over = state in FINISHED
        queued_at = now if state is JobState.QUEUED else None
        self.store.change(job.id, state, reason=reason, ended_at=now if is_over else None, queued_at=queued_at)
        self.store.tell(job.id, now, state, reason)
        self.finished += is_over
        return state

    def queue_or_block(self, job: Job, if_free: JobEvent, now: float) -> JobState:
        """Puts a job back: into the queue, or among those that wait for others."""
        found, why = prospect_of_all(self.store.dependencies(job.id))
        if found is Prospect.MET:
            return self.apply(job, if_free, now)
        state = self.apply(job, JobEvent.BLOCK, now)
        return state if found is Prospect.PENDING else self.apply(replace(job, state=state), JobEvent.REJECT, now, why)

    def settle_dependants(self, job_id: int, now: float) -> None:
        """Lets those go on that waited for it, and rejects those that waited in vain, and whoever waited for them."""
        ended = [job_id]
        while ended:  # not by recursion: a chain may be longer than Python's stack
            ended += self._settle(ended.pop(), now)

    def _settle(self, job_id: int, now: float) -> list[int]:
        """Those that it rejected."""
        dependants = self.store.dependants(job_id)
        if not dependants or self.store.state_of(job_id) not in FINISHED:
            return []
        rejected = []
        for dependant_id in dependants:
            dependant = self.store.job(dependant_id)
            if dependant is None or not can(dependant.state, JobEvent.REJECT):
                continue
            found, why = prospect_of_all(self.store.dependencies(dependant_id))
            if found is Prospect.NEVER:
                self._move(dependant, JobEvent.REJECT, now, why)
                rejected.append(dependant_id)
            elif found is Prospect.MET and dependant.state is JobState.BLOCKED:
                self._move(dependant, JobEvent.UNBLOCK, now, None)
        return rejected

    # What was used and learned

    def used(self, now: float) -> dict[Party, float]:
        """What each user and tag has used of late; what runs counts as it goes."""
        used = {party: weight(use, now) for party, use in self.uses.items()}
        for live in self.live.values():
            party = (live.job.user, live.job.spec.tag)
            used[party] = used.get(party, 0.0) + _device_seconds(live.attempt, now)
        return used

    def running(self) -> list[Running]:
        return [_running(live) for live in self.live.values()]

    def ends_after(self, job_id: int) -> float | None:
        """The earliest time at which a running job may be over, where that is known."""
        live = self.live[job_id]
        least_s = self.estimate(live.job).least_s
        return None if least_s is None else live.attempt.started_at + least_s

    def estimate(self, job: Job) -> Estimate:
        exact, coarse = fingerprints(job.words)
        return estimate(job.spec, self._durations(exact) or self._durations(coarse))

    def _charge(self, job: Job, attempt: Attempt, now: float) -> None:
        party = (job.user, job.spec.tag)
        self.uses[party] = add_use(self.uses.get(party, Use()), _device_seconds(attempt, now), now)

    def _learn(self, job: Job, seconds: float) -> None:
        for fingerprint in fingerprints(job.words):
            self._learned[fingerprint] = learn(self._durations(fingerprint), seconds)

    def _durations(self, fingerprint: str) -> Durations | None:
        return self._learned.get(fingerprint) or self.store.durations(fingerprint)

    def note_statistics(self, now: float) -> None:
        """Writes down use and durations, now and then: a crash may cost a second's worth, which decides nothing."""
        if now < self._noted_at + _NOTE_EVERY_S:
            return
        self._noted_at = now
        for party, use in self.uses.items():
            self.store.set_use(party, use)
        for fingerprint, durations in self._learned.items():
            self.store.set_durations(fingerprint, durations)
        self._learned.clear()


def _running(live: Live) -> Running:
    job, attempt = live.job, live.attempt
    return Running(
        job_id=job.id,
        user=job.user,
        tag=job.spec.tag,
        devices=len(attempt.devices),
        started_at=attempt.started_at,
        group=job.group,
        lease_id=attempt.lease_id,
    )


def _device_seconds(attempt: Attempt, now: float) -> float:
    return max(0.0, now - attempt.started_at) * max(1, len(attempt.devices))
