"""JobStore: the queries and changes of the controller, in SQL.

The cost of a read does not grow with the number of queued jobs: one index finds the first ready jobs of each lane.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from gpuyard.model.job import Attempt, Growth, Job, Outcome, OutcomeKind
from gpuyard.model.lifecycle import JobState
from gpuyard.model.placeholders import ArrayElement
from gpuyard.policy.estimates import Profile
from gpuyard.policy.queue_order import Candidate, Lane, LaneQueue, Party, WeightedUse
from gpuyard.store import row_codec
from gpuyard.store.database import PIECE, Database
from gpuyard.store.dependency_store import DependencyStore
from gpuyard.store.specs_and_code import RefusedSubmissions, StoredSpecs, Submitters


class LearnedStore:
    def __init__(self, database: Database) -> None:
        self._db = database

    def recent_use(self) -> dict[Party, WeightedUse]:
        """Return the recent device time of users and tags."""
        rows = self._db.execute("SELECT user, tag, seconds, at FROM uses").fetchall()
        return {(user, tag): WeightedUse(seconds=seconds, at=at) for user, tag, seconds, at in rows}

    def set_recent_use(self, party: Party, use: WeightedUse) -> None:
        self._db.execute("INSERT OR REPLACE INTO uses VALUES (?, ?, ?, ?)", (*party, use.seconds, use.at))

    def profile(self, fingerprint: str) -> Profile | None:
        body = self._db.value("SELECT body FROM profiles WHERE fingerprint = ?", (fingerprint,))
        return None if body is None else msgspec.json.decode(body, type=Profile)

    def set_profile(self, fingerprint: str, profile: Profile) -> None:
        row = (fingerprint, row_codec.to_json(profile), profile.seen_at)
        self._db.execute("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?)", row)


# Steps from one lane with ready jobs to the next through the index jobs_ready.
_READY_LANES = """
WITH RECURSIVE ready (lane) AS (
    SELECT (SELECT min(lane) FROM jobs WHERE state = 'queued')
    UNION ALL
    SELECT (SELECT min(lane) FROM jobs WHERE state = 'queued' AND lane > ready.lane) FROM ready WHERE lane IS NOT NULL
)
SELECT lane FROM ready WHERE lane IS NOT NULL
"""
_MARKS = ", ".join("?" * len(row_codec.ATTEMPT_COLUMNS.split(",")))
_INSERT_ATTEMPT = f"INSERT INTO attempts ({row_codec.ATTEMPT_COLUMNS}) VALUES ({_MARKS})"  # noqa: S608
_SET_PHASE, _SET_PROGRESS = (
    f"UPDATE attempts SET {columns.replace(',', ' = ?,')} = ? WHERE job = ? AND number = ?"  # noqa: S608
    for columns in (f"{row_codec.PHASE_COLUMNS}, {row_codec.PROGRESS_COLUMNS}", row_codec.PROGRESS_COLUMNS)
)


class JobStore(DependencyStore):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._known_arriving: set[int] | None = None
        self._new_last_id = 0  # until it is committed
        self.refused = RefusedSubmissions(database)
        self.specs = StoredSpecs(database)
        self.submitters = Submitters(database)
        self.learned = LearnedStore(database)
        self.spec, self.add_spec = self.specs.read, self.specs.add
        self._lane = lru_cache(maxsize=4096)(self._read_lane)

    @contextlib.contextmanager
    def transaction(self, *, is_synced: bool = False) -> Iterator[None]:
        """Commit the block's changes or roll them back, as Database.transaction does."""
        try:
            with self._db.transaction(is_synced=is_synced):
                yield
            if self._new_last_id:
                self._db.note_last_id(self._new_last_id)
                self._new_last_id = 0
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Read everything anew: later rows may get the ids of rows that were rolled back."""
        self.spec.cache_clear()
        self._lane.cache_clear()
        self._known_arriving = None
        self._new_last_id = 0
        self.has_dependencies = True

    def setting(self, name: str) -> str | None:
        value: str | None = self._value("SELECT value FROM settings WHERE name = ?", (name,))
        return value

    def set_setting(self, name: str, value: str) -> None:
        self._execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, value))

    def stopped_tags(self) -> frozenset[str]:
        """Return the tags whose jobs do not start until the user resumes them."""
        return frozenset(json.loads(self.setting("stopped_tags") or "[]"))

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs in each state, without those of submissions that were refused."""
        found = dict(self._execute("SELECT state, jobs FROM counts").fetchall())
        self.refused.subtract_from(found)
        return {state: found[state] for state in JobState}

    def find_submission(self, token: str) -> tuple[int, int] | None:
        """Return the first and last job id of the complete submission with this token."""
        query = "SELECT first_id, last_id FROM submissions WHERE token = ? AND is_complete"
        ids: tuple[int, int] | None = self._execute(query, (token,)).fetchone()
        return ids

    @property
    def arriving(self) -> set[int]:
        """Ids of submissions that are not complete."""
        if self._known_arriving is None:
            self._known_arriving = set(self._column("SELECT id FROM submissions WHERE NOT is_complete"))
        return self._known_arriving

    def is_arriving(self, job_id: int) -> bool:
        lane_id = self._value("SELECT lane FROM jobs WHERE id = ?", (job_id,)) if self.arriving else None
        return lane_id is not None and self._lane(lane_id).batch in self.arriving

    def start_submission(self, token: str, count: int) -> tuple[int, int]:
        """Return its id and the first job id. Its jobs do not start before `complete_submission`."""
        first = int(self.setting("next_id") or 1)
        self.set_setting("next_id", str(first + count))
        self._new_last_id = first + count - 1
        row = (token or None, first, first + count - 1)
        query = "INSERT INTO submissions (token, first_id, last_id, is_complete) VALUES (?, ?, ?, 0)"
        submission = self._execute(query, row).lastrowid or 0
        self.arriving.add(submission)
        return submission, first

    def complete_submission(self, submission: int) -> None:
        self._execute("UPDATE submissions SET is_complete = 1 WHERE id = ?", (submission,))
        self.arriving.discard(submission)

    def drop_incomplete_submissions(self, token: str | None = None, only: int | None = None) -> None:
        """Delete incomplete submissions, which were never acknowledged: all, or the one with this token or id."""
        query = (
            "SELECT id, first_id, last_id FROM submissions WHERE NOT is_complete AND (? IS NULL OR token = ?) "
            "AND (? IS NULL OR id = ?)"
        )
        for submission, first, last in self._execute(query, (token, token, only, only)).fetchall():
            spec = self._value("SELECT spec FROM jobs WHERE id BETWEEN ? AND ? LIMIT 1", (first, last))
            for table, column in (("dependencies", "job"), ("events", "job"), ("jobs", "id")):
                self._execute(f"DELETE FROM {table} WHERE {column} BETWEEN ? AND ?", (first, last))  # noqa: S608
            self._execute("DELETE FROM submissions WHERE id = ?", (submission,))
            self.specs.delete_unused([spec])
            self.arriving.discard(submission)

    def reserve_ids_up_to(self, job_id: int) -> None:
        if int(self.setting("next_id") or 1) <= job_id:
            self.set_setting("next_id", str(job_id + 1))

    def ensure_lane(self, lane: Lane) -> int:
        """Return the id of the stored lane that equals `lane`; add it if there is none."""
        text = row_codec.lane_to_text(lane)
        known: int | None = self._value("SELECT id FROM lanes WHERE body = ?", (text,))
        return known or self._execute("INSERT INTO lanes (body) VALUES (?)", (text,)).lastrowid or 0

    def add_jobs(self, like: Job, spec_id: int, lane_id: int, first_id: int, elements: Sequence[ArrayElement]) -> None:
        """Add a copy of `like` for each element, with ids from `first_id` on."""
        spec, name, tag = like.spec, like.spec.name, like.spec.tag
        self._db.executemany(
            "INSERT INTO jobs (id, spec, lane, state, priority, user, name, tag, submitted_at, group_id, group_limit, "
            "array_index, details, reason, ended_at, command, due_at, not_before) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    job_id, spec_id, lane_id, like.state, like.priority, like.user, name, tag, like.submitted_at,
                    like.group if spec.is_array else None, like.group_limit, element.index,
                    row_codec.details_to_text(element), like.reason, like.ended_at,
                    row_codec.own_command_text(spec, element), like.due_at, like.not_before,
                )
                for job_id, element in enumerate(elements, first_id)
            ),
        )  # fmt: skip

    def job(self, job_id: int) -> Job | None:
        query = f"SELECT {row_codec.JOB_COLUMNS} FROM jobs WHERE id = ?"  # noqa: S608 - our own column names
        row = self._execute(query, (job_id,)).fetchone()
        return None if row is None else row_codec.job_from_row(row, self.spec(row[1]))

    def ready_queues(self) -> list[LaneQueue]:
        lanes = map(self._lane, self._column(_READY_LANES))
        return [LaneQueue(lane=lane, jobs=self._ready_in(lane.id)) for lane in lanes if lane.batch not in self.arriving]

    def delete_unused_lanes(self, lanes: Iterable[int]) -> None:
        query = "DELETE FROM lanes WHERE id = ? AND NOT EXISTS (SELECT 1 FROM jobs WHERE lane = lanes.id)"
        self._db.executemany(query, [(lane,) for lane in lanes])
        self._lane.cache_clear()  # a later lane may get their ids

    def has_ready(self) -> bool:
        return self._value("SELECT 1 FROM jobs WHERE state = 'queued' LIMIT 1") is not None

    def next_jobs(self, lane_id: int, limit: int, after: int = 0) -> list[Job]:
        """Return the first queued jobs of a lane with ids above `after`."""
        query = (
            f"SELECT {row_codec.JOB_COLUMNS} FROM jobs INDEXED BY jobs_ready "  # noqa: S608 - our own column names
            "WHERE state = 'queued' AND lane = ? AND id > ? ORDER BY id LIMIT ?"
        )
        rows = self._execute(query, (lane_id, after, limit)).fetchall()
        return [row_codec.job_from_row(row, self.spec(row[1])) for row in rows]

    def count_queued(self, lanes: Iterable[int], limit: int) -> int:
        """Return the number of queued jobs of these lanes, at most `limit`."""
        query = "SELECT 1 FROM jobs INDEXED BY jobs_ready WHERE state = 'queued' AND lane = ? LIMIT ?"
        count = 0
        for lane in lanes:
            count += len(self._execute(query, (lane, limit - count)).fetchall())
            if count >= limit:
                break
        return count

    def lane_of(self, job_id: int) -> Lane:
        return self._lane(self._value("SELECT lane FROM jobs WHERE id = ?", (job_id,)))

    def count_ahead(self, lane: Lane, job_id: int) -> int:
        """Return the number of queued jobs before this job in its lane."""
        query = "SELECT count(*) FROM jobs INDEXED BY jobs_ready WHERE state = 'queued' AND lane = ? AND id < ?"
        return int(self._value(query, (lane.id, job_id)))

    def change_state(  # noqa: PLR0913 - the columns that change with a job's state
        self,
        job_id: int,
        state: JobState,
        *,
        reason: str | None = None,
        due_at: float | None = None,
        ended_at: float | None = None,
        outcome: Outcome | None = None,
        failures: int | None = None,
        queued_at: float | None = None,
        started_at: float | None = None,
    ) -> None:
        """Set the state and all columns that depend on it. `queued_at` is set if the job starts to wait again;
        `started_at` with the end of an attempt in a slice, whose start may not be stored."""
        text, body = row_codec.printable(reason), row_codec.to_json(outcome)
        self._execute(
            "UPDATE jobs SET state = ?, reason = ?, due_at = ?, ended_at = ?, outcome = ?, "
            "failures = coalesce(?, failures), queued_at = coalesce(?, queued_at), "
            "started_at = coalesce(?, started_at) WHERE id = ?",
            (state, text, due_at, ended_at, body, failures, queued_at, started_at, job_id),
        )

    def reset_failures(self, job_id: int) -> None:
        """Give the job all its retries again, and its original memory need."""
        self._execute("UPDATE jobs SET failures = 0, growth = NULL WHERE id = ?", (job_id,))

    def set_growth(self, job_id: int, growth: Growth) -> None:
        """Store the job's larger memory need and move it to a lane whose jobs are sized one by one."""
        lane = self.lane_of(job_id)
        lane_id = lane.id if lane.sizes_each else self.ensure_lane(replace(lane, sizes_each=True, batch=None))
        row = (row_codec.to_json(growth), lane_id, job_id)
        self._execute("UPDATE jobs SET growth = ?, lane = ? WHERE id = ?", row)

    def set_priority(self, job_id: int, priority: int) -> None:
        """Move the job to the lane that differs from its own only in the priority."""
        lane = self.lane_of(job_id)
        batch = lane.batch if lane.batch in self.arriving else None  # keeps it from starting before that is complete
        lane_id = self.ensure_lane(replace(lane, priority=priority, batch=batch))
        self._execute("UPDATE jobs SET priority = ?, lane = ? WHERE id = ?", (priority, lane_id, job_id))

    def add_event(self, job_id: int, at: float, kind: str, text: str | None = None) -> None:
        row = (job_id, at, kind, row_codec.printable(text))
        self._execute("INSERT INTO events (job, at, kind, text) VALUES (?, ?, ?, ?)", row)

    def due_jobs(self, now: float) -> list[int]:
        """Return delayed jobs whose time has come, in that order: some of very many, and the others in later steps."""
        query = "SELECT id FROM jobs WHERE state = 'delayed' AND due_at <= ? ORDER BY due_at LIMIT ?"
        return self._column(query, (now, PIECE))

    def next_due(self) -> float | None:
        due_at: float | None = self._value("SELECT min(due_at) FROM jobs WHERE state = 'delayed'")
        return due_at

    def start_attempt(self, attempt: Attempt) -> None:
        self._execute(_INSERT_ATTEMPT, row_codec.attempt_to_row(attempt))
        state = JobState.PENDING if attempt.started is None else JobState.RUNNING
        self._execute(
            "UPDATE jobs SET state = ?, attempts = ?, started_at = ?, reason = NULL, outcome = NULL, "
            "ended_at = NULL WHERE id = ?",
            (state, attempt.number, attempt.started_at, attempt.job_id),
        )

    def end_attempt(self, attempt: Attempt) -> None:
        """Store how an attempt ended. One that never started is dropped. `change_state` stores what becomes of its
        job."""
        if attempt.outcome is not None and attempt.outcome.kind is OutcomeKind.NEVER_STARTED:
            self.drop_attempt(attempt.job_id, attempt.number)
        else:
            self._execute(_SET_PHASE, row_codec.phase_to_row(attempt))

    def update_attempt(self, attempt: Attempt) -> None:
        """Store what changes while the attempt is live, other than its phase."""
        self._execute(_SET_PROGRESS, (*row_codec.progress_to_values(attempt), attempt.job_id, attempt.number))

    def set_phase(self, attempt: Attempt) -> None:
        """Store that it started on another machine, or how it ended, and all else that changes."""
        self._execute(_SET_PHASE, row_codec.phase_to_row(attempt))
        if attempt.over is None:
            self._execute("UPDATE jobs SET started_at = ? WHERE id = ?", (attempt.started_at, attempt.job_id))

    def drop_attempt(self, job_id: int, number: int) -> None:
        """Delete an attempt that never started; it does not count as an attempt of the job."""
        self._execute("DELETE FROM attempts WHERE job = ? AND number = ?", (job_id, number))
        self._execute("UPDATE jobs SET attempts = attempts - 1 WHERE id = ?", (job_id,))

    def skip_attempts(self, job_id: int, number: int) -> None:
        """Give the job's next attempt a higher number than this."""
        self._execute("UPDATE jobs SET attempts = max(attempts, ?) WHERE id = ?", (number, job_id))

    def live_attempts(self) -> list[tuple[Job, Attempt]]:
        query = f"SELECT {row_codec.ATTEMPT_COLUMNS} FROM attempts WHERE ended_at IS NULL ORDER BY job"  # noqa: S608
        attempts = [row_codec.attempt_from_row(row) for row in self._execute(query).fetchall()]
        return [(job, attempt) for attempt in attempts if (job := self.job(attempt.job_id)) is not None]

    def attempts(self, job_id: int) -> list[Attempt]:
        query = f"SELECT {row_codec.ATTEMPT_COLUMNS} FROM attempts WHERE job = ? ORDER BY number"  # noqa: S608
        return [row_codec.attempt_from_row(row) for row in self._execute(query, (job_id,)).fetchall()]

    def batch_state(self, group: int) -> str | None:
        body: str | None = self._value("SELECT body FROM batches WHERE first_id = ?", (group,))
        return body

    def set_batch_state(self, group: int, body: str) -> None:
        self._execute("INSERT OR REPLACE INTO batches VALUES (?, ?)", (group, body))

    def last_start_in_batch(self, group: int) -> float | None:
        query = (
            "SELECT max(started_at) FROM submissions JOIN jobs ON jobs.id BETWEEN first_id AND last_id "
            "WHERE first_id = ?"
        )
        at: float | None = self._value(query, (group,))
        return at

    def find_unfinished(self, tag: str, name: str) -> int | None:
        query = "SELECT id FROM jobs WHERE name = ? AND tag = ? AND ended_at IS NULL LIMIT 1"
        job_id: int | None = self._value(query, (name, tag))
        return job_id

    def last_start_with_tag(self, tag: str) -> float | None:
        at: float | None = self._value("SELECT max(started_at) FROM jobs WHERE tag = ?", (tag,))
        return at

    def _ready_in(self, lane_id: int) -> Iterator[Candidate]:
        query = (
            "SELECT id, coalesce(queued_at, submitted_at) FROM jobs INDEXED BY jobs_ready "
            "WHERE state = 'queued' AND lane = ? AND id > ? ORDER BY id LIMIT ?"
        )
        last, limit = 0, 4  # most steps start few jobs of a lane
        while found := self._execute(query, (lane_id, last, limit)).fetchall():
            for job_id, queued_at in found:
                yield Candidate(job_id=job_id, queued_at=queued_at)
            last, limit = found[-1][0], 64

    def _read_lane(self, lane_id: int) -> Lane:
        return row_codec.lane_from_text(lane_id, self._value("SELECT body FROM lanes WHERE id = ?", (lane_id,)))
