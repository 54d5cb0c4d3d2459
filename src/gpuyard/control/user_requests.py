"""What people ask for: submit, cancel, hold, release, suspend, resume, retry, priority, pause, clean, forget.

Large requests are done in pieces, each a transaction of its own; between two of them others are served. They are
generators: each `yield` is such a moment, what they return is the answer.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.control.controller import Controller
from gpuyard.core.device_names import check_possible, find_devices
from gpuyard.core.job.dependencies import DependencyOutlook, outlook_of_all
from gpuyard.core.job.job import Dependency, DependencyKind, Job, OutcomeKind, SuspendedBy
from gpuyard.core.job.lifecycle import FINISHED, LIVE, JobEvent, JobState
from gpuyard.core.job.selection import JobSelection
from gpuyard.core.job.submission import ArrayElement, Submission
from gpuyard.core.lease import FixedMemory, Need, WholeDevice
from gpuyard.core.sample import Sample
from gpuyard.core.scheduling.device_fit import is_of_kind
from gpuyard.core.scheduling.device_memory import capacity
from gpuyard.core.snapshot import Snapshot
from gpuyard.errors import StoreFault, UserError
from gpuyard.leases.measured_usage import LEASE_VARIABLE
from gpuyard.ports import Clock
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries
from gpuyard.store.row_codec import lane_of
from gpuyard.visible_devices import named_visible

T = TypeVar("T")
InPieces: TypeAlias = Generator[None, None, T]
Act: TypeAlias = Callable[[Job, float], None]

# A piece takes a few milliseconds; a newcomer is served after a handful of them. A small submission is one piece.
_PIECE = 200
_SMALL = 1000


class RequestRefused(Struct, frozen=True, kw_only=True):
    id: int
    reason: str


class ChangeResult(Struct, frozen=True, kw_only=True):
    ids: tuple[int, ...]
    unchanged: tuple[RequestRefused, ...] = ()


class _Batch(Struct, frozen=True, kw_only=True):
    """What the jobs of one submission have in common."""

    like: Job
    on: tuple[Dependency, ...]
    spec_id: int
    lane_id: int


class UserRequests:
    def __init__(self, controller: Controller, store: JobStore, catalogue: QueueQueries, clock: Clock) -> None:
        self._controller = controller
        self._transitions = controller.transitions
        self._store = store
        self._catalogue = catalogue
        self._clock = clock

    # Submit

    def submit(self, submission: Submission, user: str) -> InPieces[tuple[int, int]]:
        """The first and the last id, once all of them are on disk."""
        before = self._store.find_submission(submission.token) if submission.token else None
        if before is not None:
            return before
        try:
            return (yield from self._take_in(submission, user))
        except StoreFault:
            self._forget(submission.token)
            raise

    def _forget(self, token: str) -> None:
        """Of a submission that failed half-way nothing is to stay, or it could not be sent again."""
        with contextlib.suppress(StoreFault), self._store.transaction():
            self._store.drop_incomplete_submissions(token)

    def _take_in(self, submission: Submission, user: str) -> InPieces[tuple[int, int]]:
        like, on = self._first_job(submission, user)
        is_small = submission.count * (1 + len(on)) <= _SMALL
        with self._store.transaction(is_synced=is_small):
            if not is_small:
                self._store.drop_incomplete_submissions(submission.token)
            number, first = self._store.start_submission(submission.token, submission.count)
            like = replace(like, id=first, group=first if submission.spec.is_array else None)
            batch = _Batch(
                like=like,
                on=tuple(on),
                spec_id=self._store.add_spec(submission.spec),
                lane_id=self._store.ensure_lane(lane_of(like, None if is_small else number)),
            )
            pieces = _pieces(iter(submission.elements), first, max(1, _PIECE // (1 + len(on))))
            for start, piece in pieces if is_small else itertools.islice(pieces, 1):
                self._add(batch, start, piece)
            if is_small:
                self._store.complete_submission(number)
        if not is_small:
            for start, piece in pieces:
                yield
                with self._store.transaction():
                    self._add(batch, start, piece)
            yield
            with self._store.transaction(is_synced=True):
                self._store.complete_submission(number)
                for other in on:  # it may have ended in the meantime
                    self._transitions.settle_dependants(other.job_id, self._clock.now())
        return first, first + submission.count - 1

    def _add(self, batch: _Batch, first: int, piece: list[ArrayElement]) -> None:
        self._store.add_jobs(batch.like, batch.spec_id, batch.lane_id, first, piece)
        if batch.on:
            self._store.add_dependencies(range(first, first + len(piece)), batch.on)

    def _first_job(self, submission: Submission, user: str) -> tuple[Job, list[Dependency]]:
        """What all of its jobs are like, and what they wait for."""
        on = self._dependencies(submission.dependencies)
        others = ((other.job_id, other.kind, self._store.state_of(other.job_id)) for other in on)
        found, why = outlook_of_all(others)
        now = self._clock.now()
        state = {
            DependencyOutlook.MET: JobState.QUEUED,
            DependencyOutlook.PENDING: JobState.BLOCKED,
            DependencyOutlook.NEVER: JobState.REJECTED,
        }
        first = state[found]
        if submission.is_held and first is not JobState.REJECTED:
            first, why = JobState.HELD, "held when it was submitted"
        job = Job(
            id=0,
            spec=submission.spec,
            state=first,
            priority=submission.priority,
            user=user,
            submitted_at=now,
            group_limit=submission.group_limit,
            reason=why,
            ended_at=now if first is JobState.REJECTED else None,
        )
        return job, on

    def _dependencies(self, asked: Iterable[tuple[DependencyKind, JobSelection]]) -> list[Dependency]:
        found = []
        for kind, selection in asked:
            ids = [job_id for first, last in self.stretches(selection) for job_id in self._catalogue.ids(first, last)]
            # Those that are still arriving may be taken back, and nobody has been told of them yet.
            found += [Dependency(job_id=job_id, kind=kind) for job_id in ids if not self._store.is_arriving(job_id)]
        return found

    # Changes

    def cancel(self, selection: JobSelection) -> InPieces[ChangeResult]:
        return (yield from self._each(selection, self._cancel))

    def hold(self, selection: JobSelection) -> InPieces[ChangeResult]:
        return (yield from self._each(selection, self._hold))

    def release(self, selection: JobSelection) -> InPieces[ChangeResult]:
        return (yield from self._each(selection, self._release))

    def retry(self, selection: JobSelection) -> InPieces[ChangeResult]:
        return (yield from self._each(selection, self._retry))

    def suspend(self, selection: JobSelection, sample: Sample) -> InPieces[ChangeResult]:
        self._controller.observe(sample)
        return (yield from self._each(selection, lambda job, now: self._suspend(job, now, sample)))

    def resume(self, selection: JobSelection) -> InPieces[ChangeResult]:
        return (yield from self._each(selection, self._resume))

    def prioritise(self, selection: JobSelection, priority: int) -> InPieces[ChangeResult]:
        def move(job: Job, now: float) -> None:
            if job.state in FINISHED:
                raise UserError(f"it is {job.state} already")
            if job.state is JobState.PENDING:
                raise UserError(f"it is with {job.spec.engine} already, in that one's own order")
            self._transitions.prioritise(job, priority, now)

        return (yield from self._each(selection, move))

    def _cancel(self, job: Job, now: float) -> None:
        if job.state in FINISHED:
            raise UserError(f"it is {job.state} already")
        if job.state is JobState.STOPPING and not self._transitions.cancel_instead(job.id, now):
            raise UserError("it is being stopped already")
        if job.state in LIVE and job.state is not JobState.STOPPING:
            self._transitions.stop(job.id, OutcomeKind.CANCELLED, now)
        elif job.state not in LIVE:
            self._transitions.apply(job, JobEvent.CANCEL, now, "cancelled")

    def _hold(self, job: Job, now: float) -> None:
        if job.state in LIVE:
            where = f"is with {job.spec.engine}" if job.state is JobState.PENDING else "runs"
            raise UserError(f"it {where} already: `gpuyard cancel` would stop it")
        self._transitions.apply(job, JobEvent.HOLD, now, "held: `gpuyard release` lets it go on")

    def _release(self, job: Job, now: float) -> None:
        if job.state is not JobState.HELD:
            raise UserError(f"it is {job.state}, not held")
        self._transitions.queue_or_block(job, JobEvent.RELEASE, now)

    def _retry(self, job: Job, now: float) -> None:
        if job.state is JobState.DELAYED:
            self._transitions.apply(job, JobEvent.DUE, now)
        elif job.state in FINISHED:
            self._refuse_second(job)
            self._transitions.queue_or_block(job, JobEvent.REQUEUE, now)
            self._store.reset_failures(job.id)
            self._transitions.estimates.forget_job()
        else:
            raise UserError(f"it is {job.state}: only what has ended can be run again")

    def _refuse_second(self, job: Job) -> None:
        """A config of a workspace runs once at a time."""
        if job.spec.task is not None and (other := self._store.find_unfinished(job.spec.tag, job.spec.name or "")):
            raise UserError(f"job {other} does the same already")

    def _suspend(self, job: Job, now: float, sample: Sample) -> None:
        if job.state in (JobState.SUSPENDED, JobState.SUSPENDING):
            self._transitions.stay_suspended(job.id, now)
            return
        if job.state is not JobState.RUNNING:
            raise UserError(f"it is {job.state}: only what runs can be suspended")
        if job.spec.engine:
            raise UserError(f"it cannot be suspended: {job.spec.engine} has it")
        why_not = self._controller.suspend_control.refusal(
            self._transitions.live[job.id], sample, self._controller.rules
        )
        if why_not is not None:
            raise UserError(f"it cannot be suspended: {why_not}")
        self._transitions.park(job.id, SuspendedBy.BY_PERSON, now, "suspended by hand")

    def _resume(self, job: Job, now: float) -> None:
        if job.state not in (JobState.SUSPENDED, JobState.SUSPENDING):
            raise UserError(f"it is {job.state}, not suspended")
        self._transitions.resume_when_there_is_room(job.id, now)

    def _each(self, selection: JobSelection, act: Act) -> InPieces[ChangeResult]:
        changed: list[int] = []
        refused: list[RequestRefused] = []
        ids = (job_id for first, last in self.stretches(selection) for job_id in self._catalogue.ids(first, last))
        for piece in _batched(ids, _PIECE):
            now = self._clock.now()
            with self._transitions.in_step(), self._store.transaction(is_synced=True):
                for job_id in piece:
                    job = self._store.job(job_id)
                    try:
                        if job is not None and (not selection.states or job.state in selection.states):
                            act(job, now)
                            changed.append(job_id)
                    except UserError as error:
                        refused.append(RequestRefused(id=job_id, reason=str(error)))
            yield
        return ChangeResult(ids=tuple(changed), unchanged=tuple(refused))

    def stretches(self, selection: JobSelection) -> list[tuple[int, int]]:
        """The ids that are meant; UserError for those that do not exist."""
        if selection.is_empty:
            raise UserError("no job is named", hint="write an id as 17, a range as 17-20, or name=big, tag=night, all")
        found = self._catalogue.ranges(selection)
        for first, last in selection.ranges:
            if next(self._catalogue.ids(first, last), None) is None:
                what = f"job {first}" if first == last else f"job in {first}-{last}"
                raise UserError(f"there is no {what}", hint="`gpuyard queue --all` shows those there are")
        if not found and not selection.is_all:
            wanted = [f"name={name}" for name in selection.names] + [f"tag={tag}" for tag in selection.tags]
            raise UserError(f"there is no job with {' or '.join(wanted)}", hint="`gpuyard queue --all` shows all")
        return found

    # The queue as a whole

    def set_paused(self, *, paused: bool, draining: bool = False) -> None:
        with self._store.transaction(is_synced=True):
            self._store.set_setting("paused", "1" if paused else "")
            self._store.set_setting("draining", "1" if draining else "")

    def set_stopped(self, tag: str, *, stopped: bool) -> None:
        """Nothing of that tag starts, until it is set otherwise."""
        tags = self._store.stopped_tags()
        tags = tags | {tag} if stopped else tags - {tag}
        with self._store.transaction(is_synced=True):
            self._store.set_setting("stopped_tags", json.dumps(sorted(tags)))

    def forget_estimates(self, fingerprints: Sequence[str] | None) -> int:
        """What was learned under these, or all of it; how much that was."""
        with self._store.transaction():
            self._transitions.estimates.write_down()
            self._transitions.estimates.forget_job()
            return self._catalogue.delete_profiles(fingerprints)

    def clean(self, older_than_s: float) -> InPieces[list[tuple[int, int]]]:
        """The jobs that were forgotten, and how many attempts each had; their logs are the caller's to remove."""
        before = self._clock.now() - older_than_s
        gone: list[tuple[int, int]] = []
        while piece := self._catalogue.deletable(before, _PIECE):
            with self._store.transaction():
                self._catalogue.delete_jobs([job_id for job_id, _ in piece])
            gone += piece
            yield
        with self._store.transaction():
            self._catalogue.delete_unreferenced()
        return gone


def fit_to_machine(submission: Submission, snapshot: Snapshot, banned: tuple[str, ...]) -> Submission:
    """With devices by their ids; UserError for what this machine could never give."""
    need = submission.spec.need
    if submission.spec.engine:
        return submission
    if not need.devices:
        only = None if submission.devices is None else _named(submission, snapshot)
        return replace(submission, spec=replace(submission.spec, need=replace(need, only=only, banned=banned)))
    if submission.devices_are_optional and not snapshot.usable_devices():
        without = replace(submission.spec, need=Need(devices=0), sees_all_devices=True)
        return replace(submission, spec=without)
    need = replace(need, only=_named(submission, snapshot))
    suitable = [
        device
        for device in snapshot.usable_devices()
        if (need.only is None or device.id in need.only) and device.id not in banned and is_of_kind(need, device)
    ]
    if not snapshot.usable_devices():
        word = "--gpus 0" if submission.spec.task is None else "`scheduler: {gpus: 0}` in its YAML"
        raise UserError("there is no GPU to use", hint=f"`gpuyard doctor` says why; {word} does without")
    has_sizes = any(capacity(device) is not None for device in suitable)
    if submission.spec.pace is not None and isinstance(need.memory, FixedMemory) and not has_sizes:
        need = replace(need, memory=WholeDevice())  # a device of unknown size cannot be shared
    check_possible(need.devices, need.required_mb, suitable)
    return replace(submission, spec=replace(submission.spec, need=replace(need, banned=banned)))


def _named(submission: Submission, snapshot: Snapshot) -> tuple[str, ...] | None:
    """Those asked for by name; else those that a CUDA_VISIBLE_DEVICES of the user's own leaves."""
    if submission.devices is not None:
        return tuple(dict.fromkeys(find_devices(submission.devices, snapshot)))
    environment = submission.spec.environment
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or LEASE_VARIABLE in environment:  # a job that submits another has ours, which says nothing
        return None
    return tuple(device.id for device in named_visible(visible, snapshot))


def _pieces(elements: Iterator[ArrayElement], first: int, size: int) -> Iterator[tuple[int, list[ArrayElement]]]:
    while piece := list(itertools.islice(elements, size)):
        yield first, piece
        first += len(piece)


def _batched(ids: Iterator[int], size: int) -> Iterator[list[int]]:
    while piece := list(itertools.islice(ids, size)):
        yield piece
