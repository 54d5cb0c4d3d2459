"""Requests of users: submit, cancel, hold, release, suspend, resume, retry, priority, pause, clean, forget.

A large request is done in pieces, each in its own transaction, so that other requests are served between two pieces.
Such requests are generators: they yield after each piece and return the answer. Jobs without a live attempt and without
a part in dependencies are changed together, in a few SQL statements; the others one by one, with the same result.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.job import Job, OutcomeKind, PublishedEvent, PublishedEventKind, SuspendedBy
from gpuyard.model.lifecycle import FINISHED, LIVE, TRANSITIONS, WAITING, JobEvent, JobState, can
from gpuyard.model.machine_snapshot import Sample
from gpuyard.model.selection import JobSelection, describe_conditions, last_moment, parse_moment
from gpuyard.policy.estimates import Profile
from gpuyard.ports import Clock
from gpuyard.queue.add_submission import InPieces, SubmissionIntake, batched
from gpuyard.queue.dependants import Revival
from gpuyard.queue.step import Controller
from gpuyard.queue.transitions import JobTransitions
from gpuyard.schema.queue import UnchangedJob
from gpuyard.store.database import PIECE
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries


class Change(Struct, frozen=True, kw_only=True):
    """The event that jobs in `states` get, and the reason that is recorded."""

    event: JobEvent
    states: frozenset[JobState]
    reason: str | None = None
    resets: bool = False  # the jobs get all their retries, and their original memory need, again
    unnamed_only: bool = False  # others with the name of a job have to be looked at
    waits_for_time: bool = False  # a job may have to wait for its time


def _waiting_states(event: JobEvent) -> frozenset[JobState]:
    """Return the states without a live attempt, and not finished, that allow the event."""
    return frozenset(state for state in WAITING if (state, event) in TRANSITIONS)


CANCEL = Change(event=JobEvent.CANCEL, states=_waiting_states(JobEvent.CANCEL), reason="cancelled")
HOLD = Change(event=JobEvent.HOLD, states=_waiting_states(JobEvent.HOLD), reason="held until `gpuyard release`")
RELEASE = Change(event=JobEvent.RELEASE, states=_waiting_states(JobEvent.RELEASE), waits_for_time=True)
RETRY = Change(event=JobEvent.REQUEUE, states=FINISHED, resets=True, unnamed_only=True)


def change_many(
    transitions: JobTransitions, queries: QueueQueries, change: Change, job_ids: Sequence[int], now: float
) -> list[int]:
    """Change those of these jobs that the change applies to and that no dependency concerns; return their ids. Jobs
    that finish are published as one event. Call it in a transaction."""
    (state,) = {TRANSITIONS[before, change.event] for before in change.states}
    states, ready_at = sorted(change.states), now if change.waits_for_time else None
    chosen = queries.independent_jobs(job_ids, states, unnamed_only=change.unnamed_only, ready_at=ready_at)
    if not chosen:
        return []
    transitions.store.change_states(chosen, state, now, reason=change.reason, resets=change.resets)
    if change.resets:
        transitions.estimates.clear_cache()
    job = transitions.store.job(chosen[0])
    if state in FINISHED and job is not None:
        transitions.finished += len(chosen)
        kind = PublishedEventKind.FINISHED
        transitions.events.append(PublishedEvent(kind=kind, job=replace(job, state=state), at=now, jobs=len(chosen)))
    return chosen


class SelectedJobs:
    """Which jobs a selection of a user means. `since=` is a time of day of this machine."""

    def __init__(self, queries: QueueQueries, clock: Clock) -> None:
        self._queries, self._clock = queries, clock

    def located(self, selection: JobSelection) -> JobSelection:
        """Return the selection with the queue time of its `since`. Raises UserError if no job can be meant."""
        if selection.is_empty:
            hint = "give an id such as 17, a range such as 17-20, state=failed, tag=night or all"
            raise UserError("no job is given", hint=hint)
        refuse_empty_range(self._queries.empty_range(selection.ranges) if selection.ranges else None)
        if not selection.since:
            return selection
        try:
            now = datetime.fromtimestamp(self._clock.to_wall(self._clock.now()))  # noqa: DTZ006 - local time
            at = last_moment(parse_moment(selection.since), now).timestamp()
        except (ValueError, OverflowError, OSError):  # years that this system's clock does not know
            hint = "write it as since=22:00 or since=2d"
            raise UserError(f"since={selection.since} is out of range", hint=hint) from None
        return replace(selection, since_at=self._clock.from_wall(at))

    def ranges(self, selection: JobSelection) -> list[tuple[int, int]]:
        """Return the selected job ids as ranges. Raises UserError for ids that do not exist, and if none matches."""
        found = self._queries.ranges(self.located(selection))
        refuse_no_match(selection, found)
        return found

    def ids(self, selection: JobSelection) -> Iterator[int]:
        for first, last in self.ranges(selection):
            yield from self._queries.ids(first, last)


def refuse_no_match(selection: JobSelection, found: list[tuple[int, int]]) -> None:
    if not found and not (selection.is_all and not selection.has_conditions):
        among = " among these ids" if selection.ranges else ""
        raise _not_found(f"no job matches {describe_conditions(selection)}{among}")


def refuse_empty_range(ids: tuple[int, int] | None) -> None:
    if ids is not None:
        first, last = ids
        raise _not_found(f"there is no {f'job {first}' if first == last else f'job in {first}-{last}'}")


def _not_found(problem: str) -> UserError:
    return UserError(problem, hint="`gpuyard queue --all` lists all jobs", code="not_found")


Act: TypeAlias = Callable[[Job, float], None]
# A piece of a change takes about this long: other requests are served between two.
_PIECE_S = 0.008


class ChangeResult(Struct, frozen=True, kw_only=True):
    """`revived` are jobs that were skipped because of the changed ones, and wait again."""

    ids: tuple[int, ...]
    unchanged: tuple[UnchangedJob, ...] = ()
    revived: tuple[int, ...] = ()


class Supply(Struct, frozen=True, kw_only=True):
    """Values for variables whose values were dropped; `allow_missing`: jobs may run without some."""

    values: dict[str, str] = {}
    allow_missing: bool = False


class UserRequests:
    def __init__(self, controller: Controller, store: JobStore, queries: QueueQueries, clock: Clock) -> None:
        self._controller = controller
        self._transitions = controller.transitions
        self._store, self._queries, self._clock = store, queries, clock
        self._changes_of_many: dict[Act, Change] = {
            self.cancel: CANCEL, self.hold: HOLD, self.release: RELEASE, self.retry: RETRY, self.retry_only: RETRY,
        }  # fmt: skip
        self._revival = Revival(store, self._transitions.dependants)  # of the change that is being made
        self._supply = Supply()  # of that change
        # Revivals of interrupted requests, which the store knows, and how far we are with them.
        self._has_left_revivals = True  # may be; revive_more() finds out
        self._left_revival: Revival | None = None
        self.selected = SelectedJobs(queries, clock)
        intake = SubmissionIntake(self._transitions, clock, self.selected.ids)
        self.submit, self.check, self.drop_refused = intake.submit, intake.check, intake.drop_refused

    def prioritise(self, job: Job, now: float, priority: int) -> None:
        _refuse_finished(job.state)
        refuse_pending(job)
        self._transitions.prioritise(job, priority, now)

    def cancel(self, job: Job, now: float) -> None:
        _refuse_finished(job.state)
        if job.state is JobState.STOPPING and not self._transitions.cancel_instead(job.id, now):
            raise UserError("it is being stopped already")
        if job.state in LIVE and job.state is not JobState.STOPPING:
            self._transitions.stop(job.id, OutcomeKind.CANCELLED, now)
        elif job.state not in LIVE:
            self._transitions.apply(job, JobEvent.CANCEL, now, CANCEL.reason)

    def hold(self, job: Job, now: float) -> None:
        refuse_pending(job)
        if job.state in LIVE:
            raise UserError("it has already started: `gpuyard cancel` stops it")
        _refuse_finished(job.state)
        self._transitions.apply(job, JobEvent.HOLD, now, HOLD.reason)

    def release(self, job: Job, now: float) -> None:
        if job.state is not JobState.HELD:
            raise UserError(f"it is {job.state}, not held")
        self._transitions.dependants.queue_or_block(job, JobEvent.RELEASE, now)

    def retry(self, job: Job, now: float) -> None:
        """Run a finished job again, and let the jobs wait again that were skipped because of it."""
        self._retry(job, now)
        self._revival.add(job.id)

    def retry_only(self, job: Job, now: float) -> None:
        """Run a finished job again. Jobs of a submission that is still being stored are not skipped yet: they wait."""
        self._retry(job, now)
        if self._store.arriving:
            self._revival.add(job.id, among=self._store.is_arriving)

    def _retry(self, job: Job, now: float) -> None:
        if job.state is JobState.DELAYED:
            self._transitions.apply(job, JobEvent.DUE, now)
        elif job.state in FINISHED:
            # A config of a workspace has one live job at most.
            if job.spec.task is not None and (other := self._store.find_unfinished(job.spec.tag, job.spec.name or "")):
                raise UserError(f"job {other} already runs this config")
            self._transitions.dependants.queue_or_block(job, JobEvent.REQUEUE, now)
            self._store.reset_failures(job.id)
            self._transitions.estimates.clear_cache()
        else:
            raise UserError(f"it is {job.state}: only finished jobs can be retried")

    def suspend(self, job: Job, now: float, sample: Sample) -> None:
        self._controller.usage_tracker.note(sample, now)
        if job.spec.engine:
            raise UserError(f"it runs on {job.spec.engine}, and only local jobs can be suspended")
        if job.state in (JobState.SUSPENDED, JobState.SUSPENDING):
            self._transitions.change_parking(job.id, now, by_person=True)
            return
        if job.state is not JobState.RUNNING:
            raise UserError(f"it is {job.state}: only running jobs can be suspended")
        live = self._transitions.live[job.id]
        why_not = self._controller.suspend_control.refusal(live, sample, self._controller.rules)
        if why_not is not None:
            raise UserError(f"it cannot be suspended: {why_not}")
        self._transitions.suspend(job.id, SuspendedBy.BY_PERSON, now, "suspended by hand")

    def resume(self, job: Job, now: float) -> None:
        if job.state not in (JobState.SUSPENDED, JobState.SUSPENDING):
            raise UserError(f"it is {job.state}, not suspended")
        if job.spec.engine:
            raise UserError(f"{job.spec.engine} has suspended it, and resumes it")
        self._transitions.change_parking(job.id, now, by_person=False)

    def change(
        self, selection: JobSelection, act: Act, supply: Supply | None = None, *, is_last: bool = True
    ) -> InPieces[ChangeResult]:
        """Apply `act`, such as `cancel`, to each selected job; a job for which it raises UserError is unchanged. With a
        `supply`, jobs whose secrets were dropped get them again, and are unchanged if it lacks some. `is_last`: the
        request selects no more jobs."""
        changed: list[int] = []
        refused: list[UnchangedJob] = []
        revival = Revival(self._store, self._transitions.dependants)
        # The states of jobs whose ids are known are checked as they are changed: they may have changed since.
        ids = self.selected.ids(replace(selection, states=()) if selection.ranges else selection)
        pieces = batched(iter(ids), PIECE)
        piece, following = next(pieces, []), next(pieces, [])
        try:
            yield from self._settle()
            while piece:
                # The sync of the last commit covers those before it.
                with self._transitions.in_step(), self._store.transaction(is_synced=is_last and not following):
                    self._revival, self._supply = revival, supply or Supply()
                    lacking = {} if supply is None else self._supply_secrets(piece)
                    done, not_done, piece = self._change_piece(piece, selection.states, act, lacking)
                changed += done
                refused += not_done
                yield
                yield from self._settle(revival, supply)
                if not piece:
                    piece, following = following, next(pieces, [])
        finally:
            self._has_left_revivals = self._has_left_revivals or revival.has_undecided()
        others = {each for each in revival.revived.difference(changed) if not self._store.is_arriving(each)}
        return ChangeResult(ids=tuple(changed), unchanged=tuple(refused), revived=tuple(sorted(others)))

    def _settle(self, revival: Revival | None = None, supply: Supply | None = None) -> InPieces[None]:
        """Decide all dependants of the jobs that have changed so far."""
        dependants = self._transitions.dependants
        while dependants.has_more or (revival is not None and revival.has_undecided()):
            with self._transitions.in_step(), self._store.transaction():
                dependants.settle_more(self._clock.now())
                if revival is not None:
                    self._revival, self._supply = revival, supply or Supply()
                    self._revive_dependants(self._clock.now())
            yield

    def revive_more(self) -> bool:
        """Revive some of the dependants that an interrupted request or daemon left. Return whether there are more."""
        if not self._has_left_revivals:
            return False
        revival, self._left_revival = self._left_revival or Revival(self._store, self._transitions.dependants), None
        with self._transitions.in_step(), self._store.transaction():
            if not revival.has_undecided():
                revival.load()
            self._revival, self._supply = revival, Supply()
            self._revive_dependants(self._clock.now())
        self._has_left_revivals = revival.has_undecided()
        self._left_revival = revival if self._has_left_revivals else None
        return self._has_left_revivals

    def _supply_secrets(self, job_ids: Sequence[int]) -> dict[int, tuple[str, ...]]:
        """Return the jobs that lack values of variables, and which."""
        return self._store.specs.supply(job_ids, self._supply.values, allow_missing=self._supply.allow_missing)

    def _change_piece(
        self, piece: list[int], only: Sequence[JobState], act: Act, lacking: Mapping[int, tuple[str, ...]]
    ) -> tuple[list[int], list[UnchangedJob], list[int]]:
        """Change the jobs for which that needs no more than SQL together, and the others one by one. Return the jobs
        that changed, those that did not, and the rest: it follows when all dependants of these are decided."""
        began, now = self._clock.monotonic(), self._clock.now()
        found, is_arriving = self._store.states_of(piece).items(), self._store.is_arriving
        states = {each: state for each, state in found if (not only or state in only) and not is_arriving(each)}
        refused = [
            UnchangedJob(id=job_id, state=states.pop(job_id), reason=_lacking_text(names), variables=names)
            for job_id, names in lacking.items()
            if job_id in states
        ]
        change = self._changes_of_many.get(act)
        # Their keeper has not said yet whether they have begun. If they were held now, they might run twice.
        text = "it is about to start: try again in a moment"
        unready = dict.fromkeys(sorted(states.keys() & self._transitions.upcoming.keys()), text)
        unready |= self._lacking_code(list(states)) if change is RETRY else {}
        refused += [UnchangedJob(id=each, state=states.pop(each), reason=text) for each, text in unready.items()]
        together = [] if change is None else change_many(self._transitions, self._queries, change, list(states), now)
        changed = list(together)
        others, rest = sorted(states.keys() - set(together)), list[int]()
        for place, job_id in enumerate(others):
            self._revive_dependants(now, job_id)
            is_long = bool(place or together) and self._clock.monotonic() - began > _PIECE_S
            if is_long or self._transitions.dependants.has_more or self._revival.has_undecided(job_id):
                rest = others[place:]
                break
            state = states[job_id]
            try:
                if change in (CANCEL, HOLD):
                    _refuse_finished(state)  # without reading the job: there may be very many
                job = self._store.job(job_id)
                assert job is not None
                state = job.state  # the change of another job may have changed it
                if job_id not in self._revival.revived:
                    act(job, now)
                changed.append(job_id)
            except UserError as error:
                refused.append(UnchangedJob(id=job_id, state=state, reason=str(error)))
        self._revive_dependants(now)
        return sorted(changed), refused, rest

    def _lacking_code(self, job_ids: Sequence[int]) -> dict[int, str]:
        """Return the jobs whose snapshot was removed, and what to do."""
        specs = self._store.specs
        found = ((job_id, specs.read(spec).code.snapshot) for job_id, spec in specs.code.specs_to_run_again(job_ids))
        text = "the snapshot of its code was removed (`snapshots` under [keep]): submit it again from its directory"
        return {job_id: text for job_id, each in found if each is not None and not os.path.isdir(each.folder)}

    def _revive_dependants(self, now: float, up_to: int | None = None) -> None:
        """Let dependants of retried jobs wait again, all or those up to an id. Those that lack secrets are held."""
        if revived := self._revival.decide(now, up_to):
            lacking = {job_id: _lacking_text(names) for job_id, names in self._supply_secrets(revived).items()}
            for job_id, text in {**lacking, **self._lacking_code(list(revived))}.items():
                job = self._store.job(job_id)
                if job is not None and can(job.state, JobEvent.HOLD):
                    self._transitions.apply(job, JobEvent.HOLD, now, text)
        if up_to is None:
            self._revival.store()

    def set_paused(self, *, paused: bool, draining: bool = False) -> None:
        with self._store.transaction(is_synced=True):
            self._store.set_setting("paused", "1" if paused else "")
            self._store.set_setting("draining", "1" if draining else "")

    def set_stopped(self, tag: str, *, stopped: bool) -> None:
        """Keep jobs of this tag from starting, or allow them again."""
        tags = self._store.stopped_tags() | {tag} if stopped else self._store.stopped_tags() - {tag}
        with self._store.transaction(is_synced=True):
            self._store.set_setting("stopped_tags", json.dumps(sorted(tags)))

    def forget_estimates(self, fingerprints: Sequence[str] | None) -> int:
        """Delete the profiles with these fingerprints, or all; return how many were deleted."""
        with self._store.transaction():
            self._transitions.estimates.save()
            self._transitions.estimates.clear_cache()
            return self._queries.delete_profiles(fingerprints)

    def import_estimates(self, profiles: Mapping[str, Profile], *, replace_known: bool) -> int:
        """Add profiles by fingerprint; return how many. Profiles that were learned here stay unless `replace_known`."""
        with self._store.transaction(is_synced=True):
            self._transitions.estimates.clear_cache()
            added = [each for each in profiles if replace_known or self._store.learned.profile(each) is None]
            for fingerprint in added:
                self._store.learned.set_profile(fingerprint, profiles[fingerprint])
            return len(added)

    def clean(self, older_than_s: float) -> InPieces[list[int]]:
        """Delete old finished jobs, and return their ids. The caller removes their logs."""
        return self._queries.old_jobs.delete_ended_before(self._clock.now() - older_than_s)


def _lacking_text(names: Sequence[str]) -> str:
    return (
        f"the values of secret variables were deleted, and this job lacks {', '.join(names)}: set them in a shell and "
        "run `gpuyard retry` or `release` there, or add --allow-missing"
    )


def refuse_pending(job: Job) -> None:
    """Refuse a job that its site has not given back in time (`SchedulerLoop.take_back`)."""
    if job.state is JobState.PENDING:
        raise UserError(f"it waits at {job.spec.engine}, which has not given it back yet: try again in a moment")


def _refuse_finished(state: JobState) -> None:
    if state in FINISHED:
        was = "was already" if state in (JobState.CANCELLED, JobState.REJECTED) else "has already"
        raise UserError(f"it {was} {state}")
