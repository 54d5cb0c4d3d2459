"""DependencyStore: which jobs depend on which, in SQL. JobStore is one."""

import json
from collections.abc import Iterable, Sequence

from gpuyard.core.job.dependencies import Dependency, DependencyKind, DependencyOutlook, DependencyState, outlook
from gpuyard.core.job.lifecycle import JobState
from gpuyard.store.database import Database


class DependencyStore:
    def __init__(self, database: Database) -> None:
        self._db = database
        self._execute = database.execute
        self._value = database.value
        self._column = database.column
        self.has_dependencies = self._value("SELECT 1 FROM dependencies LIMIT 1") is not None

    def add_pairs(self, pairs: Iterable[tuple[int, Dependency]]) -> None:
        """Add dependencies, each with the id of the job that has it."""
        self.has_dependencies = True
        self._db.executemany(
            "INSERT INTO dependencies VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            ((job_id, other.job_id, other.kind) for job_id, other in pairs),
        )

    def dependants(self, job_id: int) -> list[int]:
        if not self.has_dependencies:
            return []
        query = "SELECT DISTINCT job FROM dependencies WHERE on_job = ? ORDER BY job"
        return self._column(query, (job_id,))

    def dependencies(self, job_id: int) -> list[DependencyState]:
        query = (
            "SELECT on_job, kind, state FROM dependencies JOIN jobs ON jobs.id = on_job WHERE job = ? ORDER BY on_job"
        )
        found = self._execute(query, (job_id,)).fetchall()
        return [(other, DependencyKind(kind), JobState(state)) for other, kind, state in found]

    def may_decide(self, job_id: int, ended: int, *, is_blocked: bool) -> bool:
        """Return whether the end of job `ended` may decide that `job_id` can start or never can, given that no earlier
        end did. A job that depends on thousands is checked at the end of each: only the last reads them all."""
        query = "SELECT kind FROM dependencies WHERE job = ? AND on_job = ?"
        state = self.state_of(ended)
        for kind in map(DependencyKind, self._column(query, (job_id, ended))):
            if outlook(kind, state) is DependencyOutlook.MET:
                decides = is_blocked and not self._has_pending(job_id, DependencyKind.OK)
            else:
                decides = kind is DependencyKind.OK or not self._has_pending(job_id, kind)
            if decides:
                return True
        return False

    def _has_pending(self, job_id: int, like: DependencyKind) -> bool:
        """Return whether a dependency has not ended: of the set of which one has to fail, or of the others. The query
        tries the last first: jobs mostly end in order."""
        kinds = "= 'failed'" if like is DependencyKind.FAILED else "<> 'failed'"
        query = (
            "SELECT 1 FROM dependencies JOIN jobs ON jobs.id = on_job "  # noqa: S608 - our own text
            f"WHERE job = ? AND ended_at IS NULL AND kind {kinds} ORDER BY on_job DESC LIMIT 1"
        )
        return self._value(query, (job_id,)) is not None

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

    def array_index(self, job_id: int) -> int | None:
        index: int | None = self._value("SELECT array_index FROM jobs WHERE id = ?", (job_id,))
        return index
