"""DependencyStore: which jobs depend on which, and the states of many jobs, in SQL. JobStore is one."""

import json
from collections.abc import Iterable, Sequence

from msgspec import Struct

from gpuyard.model.dependencies import Dependency, DependencyKind, DependencyOutlook, DependencyState, outlook
from gpuyard.model.lifecycle import FINISHED, JobState
from gpuyard.store.database import Database


class Dependant(Struct, frozen=True):
    """A job that depends on another one in these ways. `not_before` is the earliest start that its user asked for."""

    id: int
    state: JobState
    not_before: float | None
    kinds: tuple[DependencyKind, ...]


class DependencyStore:
    def __init__(self, database: Database) -> None:
        self._db = database
        self._execute, self._value, self._column = database.execute, database.value, database.column
        self.has_dependencies = self._value("SELECT 1 FROM dependencies LIMIT 1") is not None

    def add_pairs(self, pairs: Iterable[tuple[int, Dependency]]) -> None:
        """Add dependencies, each with the id of the job that has it."""
        self.has_dependencies = True
        self._db.executemany(
            "INSERT INTO dependencies VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            ((job_id, other.job_id, other.kind) for job_id, other in pairs),
        )

    def dependants(self, job_id: int, *, after: int = 0, limit: int = -1) -> list[int]:
        """Return the dependants with higher ids than `after`, by id: all, or the first ones."""
        if not self.has_dependencies:
            return []
        query = "SELECT DISTINCT job FROM dependencies WHERE on_job = ? AND job > ? ORDER BY job LIMIT ?"
        return self._column(query, (job_id, after, limit))

    def with_dependants(self, job_ids: Sequence[int]) -> list[int]:
        """Return those of these jobs that other jobs depend on."""
        query = "SELECT value FROM json_each(?) WHERE EXISTS (SELECT 1 FROM dependencies WHERE on_job = value)"
        return self._column(query, (json.dumps(job_ids),)) if self.has_dependencies else []

    def dependants_after(self, job_id: int, after: int, limit: int) -> list[Dependant]:
        """Return the first dependants with higher ids than `after`, by id."""
        if not self.has_dependencies:
            return []
        query = (
            "SELECT job, state, not_before, group_concat(kind) FROM dependencies JOIN jobs ON jobs.id = job "
            "WHERE on_job = ? AND job > ? GROUP BY job ORDER BY job LIMIT ?"
        )
        found = self._execute(query, (job_id, after, limit)).fetchall()
        return [
            Dependant(dependant, JobState(state), not_before, tuple(map(DependencyKind, kinds.split(","))))
            for dependant, state, not_before, kinds in found
        ]

    def dependencies(self, job_id: int) -> list[DependencyState]:
        return self.dependencies_of([job_id])[job_id]

    def dependencies_of(self, job_ids: Sequence[int]) -> dict[int, list[DependencyState]]:
        query = (
            "SELECT job, on_job, kind, state FROM dependencies JOIN jobs ON jobs.id = on_job "
            "WHERE job IN (SELECT value FROM json_each(?)) ORDER BY job, on_job"
        )
        found: dict[int, list[DependencyState]] = {job_id: [] for job_id in job_ids}
        for job_id, other, kind, state in self._execute(query, (json.dumps(job_ids),)).fetchall():
            found[job_id].append((other, DependencyKind(kind), JobState(state)))
        return found

    def may_decide(self, dependants: Iterable[Dependant], ended: JobState) -> set[int]:
        """Return the dependants of which the end of a job, in this state, may decide that they can start or never can,
        given that no earlier end did. A job that depends on thousands is checked at each end: only the last reads
        all."""
        decided: set[int] = set()
        undecided: dict[bool, list[int]] = {True: [], False: []}  # by whether those that had to fail are awaited
        for each in dependants:
            for kind in each.kinds:
                if outlook(kind, ended) is DependencyOutlook.MET:
                    if each.state is JobState.BLOCKED:
                        undecided[False].append(each.id)
                elif kind is DependencyKind.OK:
                    decided.add(each.id)
                else:
                    undecided[kind is DependencyKind.FAILED].append(each.id)
        for had_to_fail, job_ids in undecided.items():
            if open_ids := [each for each in job_ids if each not in decided]:
                # All dependencies have ended, of the set of which one has to fail, or of the others. The last is tried
                # first: jobs mostly end in order.
                kinds = "= 'failed'" if had_to_fail else "<> 'failed'"
                query = (
                    "SELECT value FROM json_each(?) WHERE (SELECT 1 FROM dependencies JOIN jobs ON jobs.id = on_job "  # noqa: S608
                    f"WHERE job = value AND ended_at IS NULL AND kind {kinds} ORDER BY on_job DESC LIMIT 1) IS NULL"
                )
                decided.update(self._column(query, (json.dumps(open_ids),)))
        return decided

    def may_reject_ready(self, job_id: int, after: int) -> bool:
        """Return whether queued jobs with higher ids than `after` may be rejected because of the end of this job."""
        lost = [kind for kind in DependencyKind if outlook(kind, self.state_of(job_id)) is DependencyOutlook.NEVER]
        query = (
            "SELECT 1 FROM dependencies JOIN jobs ON jobs.id = job "
            "WHERE on_job = ? AND job > ? AND kind IN (SELECT value FROM json_each(?)) AND state = 'queued' LIMIT 1"
        )
        return bool(lost) and self._value(query, (job_id, after, json.dumps(lost))) is not None

    def unsettled(self, *, revives: bool) -> list[int]:
        return self._column("SELECT job FROM unsettled WHERE revives = ?", (revives,))

    def add_unsettled(self, job_ids: Iterable[int], *, revives: bool) -> None:
        rows = [(job_id, revives) for job_id in job_ids]
        self._db.executemany("INSERT INTO unsettled VALUES (?, ?) ON CONFLICT DO NOTHING", rows)

    def drop_unsettled(self, job_ids: Iterable[int], *, revives: bool) -> None:
        rows = [(job_id, revives) for job_id in job_ids]
        self._db.executemany("DELETE FROM unsettled WHERE job = ? AND revives = ?", rows)

    def has_lost_dependency(self, job_id: int) -> bool:
        """Return whether a job that has to succeed ended otherwise."""
        query = (
            "SELECT 1 FROM dependencies JOIN jobs ON jobs.id = on_job WHERE job = ? AND kind = 'ok' "
            "AND ended_at IS NOT NULL AND state <> 'succeeded' ORDER BY on_job DESC LIMIT 1"
        )
        return self._value(query, (job_id,)) is not None

    def state_of(self, job_id: int) -> JobState:
        return JobState(self._value("SELECT state FROM jobs WHERE id = ?", (job_id,)))

    def states_of(self, job_ids: Sequence[int]) -> dict[int, JobState]:
        """Return the states of those of these jobs that exist."""
        query = "SELECT id, state FROM jobs WHERE id IN (SELECT value FROM json_each(?))"
        return {job_id: JobState(state) for job_id, state in self._execute(query, (json.dumps(job_ids),)).fetchall()}

    def change_states(
        self, job_ids: Sequence[int], state: JobState, at: float, *, reason: str | None, resets: bool = False
    ) -> None:
        """Do as `change_state` for jobs without a live attempt, with an event for each. `resets`: `reset_failures`,
        too."""
        ids = json.dumps(job_ids)
        ended_at, queued_at = at if state in FINISHED else None, at if state is JobState.QUEUED else None
        self._execute(
            "UPDATE jobs SET state = ?, reason = ?, due_at = NULL, ended_at = ?, outcome = NULL, "  # noqa: S608
            f"queued_at = coalesce(?, queued_at){', failures = 0, growth = NULL' if resets else ''} "
            "WHERE id IN (SELECT value FROM json_each(?))",
            (state, reason, ended_at, queued_at, ids),
        )
        query = "INSERT INTO events (job, at, kind, text) SELECT value, ?, ?, ? FROM json_each(?)"
        self._execute(query, (at, state, reason, ids))

    def array_index(self, job_id: int) -> int | None:
        index: int | None = self._value("SELECT array_index FROM jobs WHERE id = ?", (job_id,))
        return index
