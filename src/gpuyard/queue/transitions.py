"""All changes of jobs and attempts, and what the controller keeps in memory about live jobs and recent use.

Everything kept here can be rebuilt from the store: after a failed transaction, `reload` does so.
"""

import contextlib
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault
from gpuyard.model.job import (
    Attempt,
    Growth,
    Job,
    MemoryLack,
    Outcome,
    OutcomeKind,
    Over,
    PublishedEvent,
    PublishedEventKind,
    Started,
    SuspendedBy,
    Usage,
)
from gpuyard.model.lease import Claim
from gpuyard.model.lifecycle import FINISHED, TRANSITIONS, JobEvent, JobState, advance, can
from gpuyard.model.retry import Verdict, judge
from gpuyard.model.stopping import STOP_REASONS, STOPPING, outcome_after_stop, stop_times
from gpuyard.model.units import format_duration
from gpuyard.policy.queue_order import Party
from gpuyard.queue.dependants import Dependants
from gpuyard.queue.learn_estimates import LearnedEstimates
from gpuyard.queue.live_attempts import Live, LiveJobs, RecentUse, StaggeredStarts
from gpuyard.store.database import convert_sqlite_errors
from gpuyard.store.job_store import JobStore

# Events that listeners get after one step: a few milliseconds of work.
_MOST_EVENTS = 1000


class JobTransitions:
    """All changes of jobs go through this class, inside a transaction of the store."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self.live = LiveJobs()
        self.upcoming: dict[int, Live] = {}  # recorded attempts of slices that have not begun
        self._recent_use = RecentUse(store)
        self.finished = 0
        self.last_start_at = 0.0
        self.estimates = LearnedEstimates(store)
        self.dependants = Dependants(store, self._apply, self._apply_to_many)
        self.events: list[PublishedEvent] = []
        self._is_stale = False
        self._noted_at = self._usage_noted_at = 0.0
        self._unsaved: set[int] = set()
        self._unstored: set[int] = set()  # jobs whose attempts have begun, which is not stored yet
        self.staggered_starts = StaggeredStarts(store)

    def reload(self) -> None:
        found = [Live(job=job, attempt=attempt) for job, attempt in self.store.live_attempts()]
        self.upcoming = {each.job.id: each for each in found if each.attempt.awaits_turn}
        self.live = LiveJobs(each for each in found if each.job.id not in self.upcoming)
        self._recent_use.reload()
        self._unstored.clear()
        self.staggered_starts.clear()
        self.estimates.clear_cache()
        self.dependants.reload()
        self._is_stale = False

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Wrap a transaction: if it fails, undo its changes in memory too, before the next one at the latest."""
        known = len(self.events)
        try:
            if self._is_stale:
                self.reload()
            self.dependants.begin()
            yield
        except BaseException:
            del self.events[known:]
            self._is_stale = True
            with contextlib.suppress(EnvironmentFault), convert_sqlite_errors():  # the disk may have failed
                self.reload()
            raise

    def take_events(self) -> list[PublishedEvent]:
        """Return the committed events since the last call, or the first of very many."""
        taken, self.events = self.events[:_MOST_EVENTS], self.events[_MOST_EVENTS:]
        return taken

    def start(self, job: Job, attempt: Attempt) -> None:
        """Record a new attempt: the job runs, is pending with its engine, or is pending until its turn in a slice."""
        self.store.start_attempt(attempt)
        event = JobEvent.HAND_OVER if attempt.started is None else JobEvent.START
        job = replace(job, state=advance(job.state, event), attempts=attempt.number)
        if attempt.awaits_turn:
            self.upcoming[job.id] = Live(job=job, attempt=attempt)
            return
        self.last_start_at = attempt.since
        self.staggered_starts.note(job, attempt.since)
        self._note_live(Live(job=job, attempt=attempt))

    def begin(self, live: Live, at: float, keeper_pid: int) -> None:
        """Record that an attempt's turn has come. It is stored with its end, or by `store_begun`."""
        job = replace(live.job, state=advance(live.job.state, JobEvent.START))
        stop_at = None if job.spec.time_limit_s is None else at + job.spec.time_limit_s
        attempt = replace(live.attempt, phase=Started(at=at, keeper_pid=keeper_pid), stop_at=stop_at)
        del self.upcoming[job.id]
        self._unstored.add(job.id)
        self.last_start_at = at
        self._note_live(Live(job=job, attempt=attempt))

    def _note_live(self, live: Live) -> None:
        self.live[live.job.id] = live
        if live.attempt.started is not None:
            self._publish(PublishedEventKind.STARTED, live.job, live.attempt.since, live.attempt)

    def store_begun(self) -> None:
        """Store the attempts that have begun and not ended."""
        for job_id in self._unstored:
            live = self.live[job_id]
            self.store.set_phase(live.attempt)
            self.store.change_state(job_id, live.job.state)
        self._unstored.clear()

    def recorded(self, job_id: int) -> Live | None:
        """Return the attempt of a job that has not ended, whether or not it has begun."""
        return self.live.get(job_id) or self.upcoming.get(job_id)

    def _publish(
        self, kind: PublishedEventKind, job: Job, at: float, attempt: Attempt | None = None, text: str = ""
    ) -> None:
        self.events.append(PublishedEvent(kind=kind, job=job, at=at, attempt=attempt, text=text))

    def publish_made_way(self, job_id: int, now: float, text: str) -> None:
        """Publish that the memory guard suspends or stops a job, and why; people may want to know."""
        live = self.live[job_id]
        self._publish(PublishedEventKind.MADE_WAY, live.job, now, live.attempt, text)

    def update_site(self, live: Live, attempt: Attempt, reason: str) -> None:
        """Record where a cluster engine has the attempt: it runs, or waits there for `reason`."""
        job = live.job
        if attempt.phase != live.attempt.phase:
            self.store.set_phase(attempt)
        elif attempt != live.attempt:
            self.store.update_attempt(attempt)
        has_started = attempt.started is not None
        if can(job.state, JobEvent.START) and (has_started or reason != job.reason):
            state = advance(job.state, JobEvent.START) if has_started else job.state
            job = replace(job, state=state, reason=None if has_started else reason)
            self.store.change_state(job.id, job.state, reason=job.reason)
            if has_started:
                self._publish(PublishedEventKind.STARTED, job, attempt.since, attempt)
        self.live[job.id] = Live(job=job, attempt=attempt)

    def follow_suspension(self, job_id: int, now: float, *, is_suspended: bool) -> None:
        """Record that its site has suspended or resumed a job. One that is asked to stop goes on stopping."""
        live = self.live[job_id]
        if is_suspended and live.job.state is JobState.RUNNING:
            text = f"{live.attempt.engine} has suspended it"
            self.suspend(job_id, SuspendedBy.BY_SITE, now, text)
            self.move_suspension(job_id, JobEvent.MOVED_OUT, now, text)
        elif not is_suspended and live.job.state is JobState.SUSPENDED:
            self.move_suspension(job_id, JobEvent.RESUME, now, f"{live.attempt.engine} has resumed it")
            self.move_suspension(job_id, JobEvent.CONTINUE, now)

    def stop(self, job_id: int, kind: OutcomeKind, now: float, why: str | None = None) -> None:
        """Record that the attempt is asked to stop, and when it will be killed. `why` replaces the text of `kind`."""
        live = self.live[job_id]
        times = stop_times(live.job.spec, live.attempt, kind, now)
        attempt = replace(live.attempt, stopping=kind, stop_at=times.stop_at, kill_at=times.kill_at)
        text = why or STOP_REASONS[kind]
        if times.stop_at > now:
            text += f"; it has {format_duration(times.stop_at - now)} to save its work"
        self._change(live, attempt, JobEvent.STOP, f"{STOPPING}{text}")
        self.store.add_event(job_id, now, "stopping", text)

    def cancel_instead(self, job_id: int, now: float) -> bool:
        """Turn a preemption or timeout into a cancellation. Return False if the job was already cancelled."""
        live = self.live[job_id]
        if live.attempt.stopping is OutcomeKind.CANCELLED:
            return False
        text = STOP_REASONS[OutcomeKind.CANCELLED]
        attempt = replace(live.attempt, stopping=OutcomeKind.CANCELLED)
        if attempt.stop_at is not None and attempt.stop_at > now:  # it still had time to save its work
            attempt = replace(attempt, stop_at=now, kill_at=now + live.job.spec.grace_s)
        self._change(live, attempt, None, f"{STOPPING}{text}")
        self.store.add_event(job_id, now, "stopping", text)
        return True

    def note_warning(self, job_id: int, now: float, text: str) -> None:
        """Record that the program got the signal before its stop."""
        live = self.live[job_id]
        self.keep_attempt(live, replace(live.attempt, warned_at=now))
        self.store.add_event(job_id, now, "warned", text)

    def postpone_kill(self, job_id: int, kill_at: float) -> None:
        live = self.live[job_id]
        self.keep_attempt(live, replace(live.attempt, kill_at=kill_at))

    def suspend(self, job_id: int, why: SuspendedBy, now: float, text: str) -> None:
        """Record that the job is to be suspended. Its run time pauses from now on."""
        live = self.live[job_id]
        self._change(live, replace(live.attempt, parked=why, suspended_at=now), JobEvent.SUSPEND, text)
        self.store.add_event(job_id, now, JobState.SUSPENDING, text)

    def move_suspension(self, job_id: int, event: JobEvent, now: float, text: str | None = None) -> None:
        """Record MOVED_OUT, RESUME or CONTINUE. The pause extends the time limit when the job continues."""
        live = self.live[job_id]
        attempt = live.attempt
        if event is JobEvent.CONTINUE and attempt.suspended_at is not None:
            paused = now - attempt.suspended_at
            stop_at = None if attempt.stop_at is None else attempt.stop_at + paused
            attempt = replace(attempt, suspended_s=attempt.suspended_s + paused, stop_at=stop_at)
            attempt = replace(attempt, parked=None, suspended_at=None)
        state = self._change(live, attempt, event, None if event is JobEvent.CONTINUE else text)
        self.store.add_event(job_id, now, "resumed" if event is JobEvent.CONTINUE else state, text)

    def change_parking(self, job_id: int, now: float, *, by_person: bool) -> None:
        """Let a suspended job stay so until a person resumes it, or until enough memory is free."""
        live, text = self.live[job_id], "resumes when enough memory is free"
        parked, event, note = SuspendedBy.FOR_ROOM, "resume", "requested"
        if by_person:
            text = f"suspended by hand until `gpuyard resume {job_id}`"
            parked, event, note = SuspendedBy.BY_PERSON, "suspend", "by hand: stays suspended"
        self._change(live, replace(live.attempt, parked=parked), None, text)
        self.store.add_event(job_id, now, event, note)

    def _change(self, live: Live, attempt: Attempt, event: JobEvent | None, reason: str | None) -> JobState:
        """Record the attempt, the reason and, with an `event`, the job's next state."""
        state = live.job.state if event is None else advance(live.job.state, event)
        self.store.change_state(live.job.id, state, reason=reason)
        self.keep_attempt(Live(job=replace(live.job, state=state, reason=reason), attempt=live.attempt), attempt)
        return state

    def keep_attempt(self, live: Live, attempt: Attempt) -> None:
        self.store.update_attempt(attempt)
        self.live[live.job.id] = Live(job=live.job, attempt=attempt)

    def set_reserved(self, job_id: int, claim: Claim) -> None:
        """Record the memory that the attempt reserves from now on."""
        live = self.live[job_id]
        sizes = [share.memory_mb for share in claim.shares if share.memory_mb is not None and not share.is_exclusive]
        self.keep_attempt(live, replace(live.attempt, reserved_mb=max(sizes, default=None)))

    def set_growth(self, job_id: int, growth: Growth) -> None:
        """Record what the job gets at its next start."""
        self.store.set_growth(job_id, growth)
        self.estimates.clear_cache()

    def prioritise(self, job: Job, priority: int, now: float) -> None:
        self.store.set_priority(job.id, priority)
        self.store.add_event(job.id, now, "priority", f"{job.priority} -> {priority}")
        if (live := self.live.get(job.id)) is not None:
            self.live[job.id] = Live(job=replace(live.job, priority=priority), attempt=live.attempt)

    def note_usage(self, job_id: int, usage: Usage) -> None:
        """Keep the usage of a live attempt; it is saved from time to time, and at the end."""
        self.live.set_usage(job_id, usage)
        self._unsaved.add(job_id)

    def end(  # noqa: PLR0913 - everything known about an end
        self,
        job_id: int,
        outcome: Outcome,
        now: float,
        *,
        verdict: Verdict | None = None,
        pid: int | None = None,
        lack: MemoryLack | None = None,
        unbrought: str | None = None,
    ) -> None:
        """Record how the live attempt ended, and what becomes of its job. `pid` is the program's, `verdict` replaces
        the general rules for retries, and `unbrought` is why results stay in its snapshot."""
        live = self.upcoming.pop(job_id, None) or self.live.take(job_id)
        job, attempt = live.job, live.attempt
        outcome = outcome_after_stop(job, attempt, outcome)
        before = attempt.last_live_phase if attempt.started is None else replace(attempt.started, pid=pid)
        attempt = replace(attempt, phase=Over(before=before, at=now, outcome=outcome, lack=lack))
        if outcome.kind is not OutcomeKind.NEVER_STARTED:
            self._recent_use.add(Live(job=job, attempt=attempt), now)
            self.estimates.learn(job, attempt, outcome, now)
        verdict = verdict or judge(job, outcome)
        if unbrought is not None:
            verdict = replace(verdict, note=f"; its results are not in the tree: {unbrought}")
        self._apply_verdict(job, attempt, outcome, verdict, now)

    def _apply_verdict(self, job: Job, attempt: Attempt, outcome: Outcome, verdict: Verdict, now: float) -> None:
        never_started = outcome.kind is OutcomeKind.NEVER_STARTED
        is_rerun = verdict.event is JobEvent.RETRY or verdict.growth is not None
        if is_rerun and not never_started and job.spec.tag in self.store.stopped_tags():
            text = f"{outcome.reason or outcome.kind}; its workspace was stopped, so there is no retry"
            verdict = Verdict(event=JobEvent.FAIL, counts=True, text=text)
        state = advance(job.state, verdict.event)
        is_back_in_line = never_started and state is JobState.QUEUED and not attempt.engine
        has_reason = verdict.note or not (state is JobState.SUCCEEDED or is_back_in_line)
        reason = f"{verdict.text}{verdict.note}" if has_reason else None
        self._unstored.discard(job.id)
        if verdict.growth is not None:
            self.set_growth(job.id, verdict.growth)
        if state is not JobState.SUCCEEDED:  # the attempt already records a success
            self.store.add_event(job.id, now, state, verdict.text)
        job = replace(job, state=state, reason=reason, outcome=outcome)
        if not never_started:
            self._publish(PublishedEventKind.ENDED, job, now, attempt)
        self.store.end_attempt(attempt)
        self.store.change_state(
            job.id,
            state,
            reason=reason,
            outcome=outcome,
            failures=job.failures + verdict.counts,
            due_at=now + verdict.delay_s if state is JobState.DELAYED else None,
            ended_at=now if state in FINISHED else None,
            queued_at=now if state is JobState.QUEUED and not (is_back_in_line or verdict.keeps_place) else None,
            started_at=attempt.started_at,
        )
        if state in FINISHED:
            self._publish(PublishedEventKind.FINISHED, job, now, attempt)
            self.finished += 1
            self.dependants.settle(job.id, now)

    def apply(self, job: Job, event: JobEvent, now: float, reason: str | None = None) -> JobState:
        """Change the state of a job without a live attempt. Raises UserError if its state does not allow the event."""
        state = self._apply(job, event, now, reason)
        if state in FINISHED:
            self.dependants.settle(job.id, now)
        return state

    def _apply(self, job: Job, event: JobEvent, now: float, reason: str | None = None) -> JobState:
        state = advance(job.state, event)
        due_at = job.not_before if event is JobEvent.DELAY else None
        may_be_early = event in (JobEvent.UNBLOCK, JobEvent.RELEASE)  # a retry starts at once
        if may_be_early and job.not_before is not None and job.not_before > now:
            state, due_at = advance(state, JobEvent.DELAY), job.not_before
        is_over = state in FINISHED
        queued_at = now if state is JobState.QUEUED else None
        self.store.change_state(
            job.id, state, reason=reason, due_at=due_at, ended_at=now if is_over else None, queued_at=queued_at
        )
        self.store.add_event(job.id, now, state, reason)
        if is_over:
            self.finished += 1
            self._publish(PublishedEventKind.FINISHED, replace(job, state=state, reason=reason), now)
        return state

    def _apply_to_many(self, job_ids: Sequence[int], event: JobEvent, now: float, reason: str | None = None) -> None:
        """Do as `_apply` for jobs that are unblocked or rejected, and that no time keeps waiting."""
        state = TRANSITIONS[JobState.BLOCKED, event]
        self.store.change_states(job_ids, state, now, reason=reason)
        for job in filter(None, map(self.store.job, job_ids if state in FINISHED else ())):
            self.finished += 1
            self._publish(PublishedEventKind.FINISHED, job, now)

    def used(self, now: float) -> dict[Party, float]:
        """Return the recent use of each user and tag, including running jobs."""
        return self._recent_use.used(self.live.values(), now)

    def note_statistics(self, now: float) -> None:
        """Save recent use and estimates each second, the usage of live attempts every 30 s: a crash may lose that."""
        if now < self._noted_at + 1.0:
            return
        self._noted_at = now
        self._recent_use.save()
        self.estimates.save()
        if now >= self._usage_noted_at + 30.0:
            self._usage_noted_at = now
            for job_id in self._unsaved & self.live.keys():
                self.store.update_attempt(self.live[job_id].attempt)
            self._unsaved.clear()
