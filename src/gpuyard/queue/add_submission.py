"""SubmissionIntake: stores submissions, and reads the earliest start that a user asked for.

A large one is stored in pieces, each in its own transaction, so that other requests are served between two pieces: its
jobs are not listed and do not start before all are stored.
"""

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.dependencies import WAS_HELD, Dependency, DependencyOutlook, outlook_of_all
from gpuyard.model.job import Job
from gpuyard.model.lifecycle import FINISHED, JobState
from gpuyard.model.placeholders import ArrayElement
from gpuyard.model.selection import JobSelection, format_ids, next_moment, parse_moment
from gpuyard.model.submission import Submission
from gpuyard.ports import Clock
from gpuyard.queue.transitions import JobTransitions
from gpuyard.store.database import PIECE
from gpuyard.store.row_codec import lane_of

T = TypeVar("T")
InPieces: TypeAlias = Generator[None, None, T]

# A small submission is one piece.
_SMALL = 1000


class Wanted(Struct, frozen=True, kw_only=True):
    """The dependencies of a submission: `on_all` of every job, `on_each` of the jobs with this index."""

    on_all: list[Dependency]
    on_each: dict[int, list[Dependency]]

    @property
    def per_job(self) -> int:
        return len(self.on_all) + max(map(len, self.on_each.values()), default=0)

    def of(self, first: int, piece: Sequence[ArrayElement]) -> list[tuple[int, Dependency]]:
        return [
            (job_id, other)
            for job_id, element in enumerate(piece, first)
            for other in (*self.on_all, *(self.on_each.get(element.index, ()) if element.index is not None else ()))
        ]


class SubmissionIntake:
    def __init__(
        self, transitions: JobTransitions, clock: Clock, selected_ids: Callable[[JobSelection], Iterable[int]]
    ) -> None:
        """`selected_ids` raises UserError for jobs that do not exist."""
        self._transitions = transitions
        self._store = transitions.store
        self._clock, self._selected_ids = clock, selected_ids

    def submit(self, submission: Submission, user: str) -> InPieces[tuple[int, int]]:
        """Store a submission; return its first and last job id, the same for one that is sent again with its token."""
        before = self._store.find_submission(submission.token) if submission.token else None
        if submission.after_each:  # its indexes are read twice
            submission = replace(submission, elements=list(submission.elements))
        return before or (yield from self._add(submission, user))

    def check(self, submission: Submission) -> None:
        """Raise UserError if `submit` would refuse the dependencies."""
        self._find_dependencies(submission)

    def _add(self, submission: Submission, user: str) -> InPieces[tuple[int, int]]:
        wanted = self._find_dependencies(submission)
        like = self._first_job(submission, user, wanted)
        is_small = submission.count * (1 + wanted.per_job) <= _SMALL
        with self._transitions.in_step(), self._store.transaction(is_synced=is_small):
            if submission.token and self._store.arriving:
                self._store.drop_incomplete_submissions(submission.token)  # it was refused, and is sent again
            number, first = self._store.start_submission(submission.token, submission.count)
            self._store.submitters.add(number, submission.submitters)
            like = replace(like, id=first, group=first if submission.spec.is_array else None)
            spec_id = self._store.add_spec(submission.spec)
            lane_id = self._store.ensure_lane(lane_of(like, None if is_small else number))

            def add(start: int, piece: list[ArrayElement]) -> None:
                self._store.add_jobs(like, spec_id, lane_id, start, piece)
                if pairs := wanted.of(start, piece):
                    self._store.add_pairs(pairs)
                # The first state is that of jobs whose own dependencies have not ended.
                own = {other.job_id for _, other in pairs} if wanted.on_each else ()
                for job_id, state in self._states(own).items():
                    if state in FINISHED:
                        self._transitions.dependants.settle(job_id, self._clock.now())

            size = submission.count if is_small else max(1, PIECE // (1 + wanted.per_job))
            pieces = zip(itertools.count(first, size), batched(iter(submission.elements), size))
            add(*next(pieces))
            if is_small:
                self._store.complete_submission(number)
        last = first + submission.count - 1
        if not is_small:
            is_stored = False
            try:
                for start, piece in pieces:
                    yield
                    with self._transitions.in_step(), self._store.transaction():
                        now = self._first_job(submission, user, wanted)  # a dependency may have ended, or run again
                        like = replace(like, state=now.state, reason=now.reason)
                        like = replace(like, ended_at=now.ended_at, due_at=now.due_at)
                        add(start, piece)
                yield
                with self._transitions.in_step(), self._store.transaction(is_synced=True):
                    self._store.complete_submission(number)
                is_stored = True
            finally:
                if not is_stored:
                    self._store.refused.add(number, first, last)
        return first, last

    def _states(self, job_ids: Iterable[int]) -> dict[int, JobState]:
        """Return the states of dependencies. Raises UserError if one was deleted since the submission began."""
        job_ids = sorted(job_ids)
        states = self._store.states_of(job_ids)
        if len(states) < len(job_ids):
            gone = format_ids([job_id for job_id in job_ids if job_id not in states])
            hint = "submit again, without the dependency on it: it had finished"
            raise UserError(f"job {gone} was deleted while these were submitted", hint=hint)
        return states

    def drop_refused(self) -> bool:
        """Delete some jobs of refused submissions. Return whether there are more."""
        if self._store.refused:
            with self._store.transaction():
                submission = self._store.refused.drop_some(PIECE)
                if submission is not None:
                    self._store.drop_incomplete_submissions(only=submission)
        return bool(self._store.refused)

    def _first_job(self, submission: Submission, user: str, wanted: Wanted) -> Job:
        """Return a template of all its jobs. Jobs with dependencies of their own start as blocked."""
        states = self._states({other.job_id for other in wanted.on_all})
        found, why = outlook_of_all((other.job_id, other.kind, states[other.job_id]) for other in wanted.on_all)
        now = self._clock.now()
        not_before, is_never = submission.not_before, found is DependencyOutlook.NEVER
        if submission.is_held:
            first, why = JobState.HELD, f"{why}{WAS_HELD}" if is_never else "submitted as held"
        elif wanted.on_each or found is DependencyOutlook.PENDING:
            first = JobState.BLOCKED
        else:
            first = JobState.DELAYED if not_before is not None and not_before > now else JobState.QUEUED
        first = JobState.REJECTED if is_never else first
        return Job(
            id=0,
            spec=submission.spec,
            state=first,
            priority=submission.priority,
            user=user,
            submitted_at=now,
            group_limit=submission.group_limit,
            reason=why,
            ended_at=now if first is JobState.REJECTED else None,
            due_at=not_before if first is JobState.DELAYED else None,
            not_before=not_before,
        )

    def _find_dependencies(self, submission: Submission) -> Wanted:
        known = ((kind, self._known_ids(selection)) for kind, selection in submission.dependencies)
        on_all = [Dependency(job_id=job_id, kind=kind) for kind, ids in known for job_id in ids]
        on_each: dict[int, list[Dependency]] = {}
        for selection in submission.after_each:
            paired = self._by_index(list(self._known_ids(selection)))
            _check_indexes({each.index for each in submission.elements}, paired)
            for index, ids in paired.items():
                on_each.setdefault(index, []).extend(Dependency(job_id=job_id) for job_id in ids)
        return Wanted(on_all=on_all, on_each=on_each)

    def _known_ids(self, selection: JobSelection) -> Iterator[int]:
        # Jobs of an incomplete submission may still be dropped, and their ids are not known to any user yet.
        return (job_id for job_id in self._selected_ids(selection) if not self._store.is_arriving(job_id))

    def _by_index(self, job_ids: Sequence[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for job_id in job_ids:
            index = self._store.array_index(job_id)
            if index is None:
                raise UserError(
                    f"--after-each pairs the indexes of two arrays, and job {job_id} has none",
                    hint="name all jobs of an array, as `gpuyard submit --array` printed them; or use --after",
                )
            found.setdefault(index, []).append(job_id)
        return found


def _check_indexes(own: set[int | None], others: dict[int, list[int]]) -> None:
    """Refuse an array that has not the same indexes as the jobs it is paired with."""
    indexes = {index for index in own if index is not None}
    if len(indexes) < len(own):
        raise UserError("--after-each pairs the indexes of two arrays, and these jobs have none", hint="give --array")
    lacking = [
        f"{who} no index {format_ids(missing)}"
        for who, missing in (
            ("the jobs of --after-each have", indexes - others.keys()),
            ("this array has", others.keys() - indexes),
        )
        if missing
    ]
    if lacking:
        raise UserError(
            f"the indexes of the arrays do not match: {', and '.join(lacking)}",
            hint="give both arrays the same --array range, and name all jobs of the other one, such as 17-26",
        )


def batched(values: Iterator[T], size: int) -> Iterator[list[T]]:
    while piece := list(itertools.islice(values, size)):
        yield piece


def read_start_time(text: str, clock: Clock) -> float:
    """Return the queue time of a moment such as `22:00` or `+2h`. UserError if it is over: that is a mistake."""
    now = clock.now()
    moment = parse_moment(text)
    if isinstance(moment, timedelta):
        return now + moment.total_seconds()
    try:
        local = datetime.fromtimestamp(clock.to_wall(now))  # noqa: DTZ006 - local time
        at = clock.from_wall(next_moment(moment, local).timestamp())
    except (ValueError, OverflowError, OSError):  # years that this system's clock does not know
        raise UserError(f"--at {text} is out of range", hint="write it as 22:00 or 2026-11-18T22:00") from None
    if at < now - 1.0:
        raise UserError(f"--at {text} is past", hint="leave it out to start now")
    if at > now + 3660 * 86400.0:
        raise UserError(f"--at {text} is more than ten years from now", hint="write it as 22:00 or 2026-11-18T22:00")
    return at
