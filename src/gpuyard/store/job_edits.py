"""JobEdits: gives waiting jobs another spec. Jobs of a submission that had one spec share the new one."""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from gpuyard.core.job.job import Job
from gpuyard.core.job.job_spec import JobSpec
from gpuyard.core.job.lifecycle import WAITING, JobState
from gpuyard.store import row_codec
from gpuyard.store.database import Database
from gpuyard.store.job_store import JobStore


class JobEdits:
    """The edits of one request: jobs that were alike stay so, and their lane is looked up once."""

    def __init__(self, database: Database, store: JobStore) -> None:
        self._db = database
        self._store = store
        self._lanes: dict[tuple[int, int, bool], int] = {}  # by the new spec, the old lane, and whether sizes differ

    def spec_of(self, job_id: int) -> int:
        """Return the number of the job's spec."""
        return int(self._db.value("SELECT spec FROM jobs WHERE id = ?", (job_id,)))

    def one_of_each_spec(self, ranges: Iterable[tuple[int, int]]) -> Iterator[Job]:
        """Yield a waiting job of each spec in these ranges of ids."""
        waiting = ", ".join(f"'{state}'" for state in sorted(WAITING))
        query = f"SELECT min(id) FROM jobs WHERE id BETWEEN ? AND ? AND state IN ({waiting}) GROUP BY spec"  # noqa: S608
        for each in ranges:
            for job_id in self._db.column(query, each):
                if (job := self._store.job(job_id)) is not None:
                    yield job

    def add_spec(self, spec: JobSpec) -> int:
        return self._store.add_spec(spec)

    def replace_spec(self, job: Job, spec_id: int, *, drops_growth: bool) -> None:
        """Store the spec and the priority that `job` has now. Call it in a transaction."""
        sizes_each = bool(job.growth.count) and not drops_growth
        lane_id = self._lane_id(job, spec_id, sizes_each=sizes_each)
        row = (spec_id, lane_id, job.priority, job.spec.name, job.spec.tag, job.id)
        growth = ", growth = NULL" if drops_growth else ""
        query = f"UPDATE jobs SET spec = ?, lane = ?, priority = ?, name = ?, tag = ?{growth} WHERE id = ?"  # noqa: S608
        self._db.execute(query, row)

    def _lane_id(self, job: Job, spec_id: int, *, sizes_each: bool) -> int:
        before = self._store.lane_of(job.id)
        key = spec_id, before.id, sizes_each
        if key not in self._lanes:
            batch = before.batch if before.batch in self._store.arriving else None  # as long as it must not start
            lane = row_codec.lane_of(job, batch)
            self._lanes[key] = self._store.ensure_lane(replace(lane, sizes_each=lane.sizes_each or sizes_each))
        return self._lanes[key]

    def set_start(self, job_id: int, not_before: float | None) -> None:
        """Store the earliest start; of a delayed job, also when it is due."""
        due_at = f"CASE WHEN state = '{JobState.DELAYED}' THEN ?1 END"
        self._db.execute(f"UPDATE jobs SET not_before = ?1, due_at = {due_at} WHERE id = ?2", (not_before, job_id))  # noqa: S608

    def delete_unused_specs(self, numbers: Iterable[int]) -> None:
        self._store.specs.delete_unused(numbers)
