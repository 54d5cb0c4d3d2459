"""Read the jobs that ended in a time, for summaries. They are found by the index over the times of their ends."""

import sqlite3

from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.report.queue_summary import FailedJob, FinishedJobs

_ENDED_SINCE = "FROM jobs INDEXED BY jobs_finished WHERE ended_at IS NOT NULL AND ended_at > ?"
_COUNTS = f"SELECT state, count(*) {_ENDED_SINCE} GROUP BY state"
_FAILED = (
    "SELECT id, json_extract(outcome, '$.error_line'), json_extract(outcome, '$.reason'), reason "
    f"{_ENDED_SINCE} AND state = ? ORDER BY id"
)


def finished_since(connection: sqlite3.Connection, since: float) -> FinishedJobs:
    counts = {JobState(state): count for state, count in connection.execute(_COUNTS, (since,))}
    failed = tuple(
        FailedJob(id=job_id, error_line=error, outcome_reason=outcome, reason=reason)
        for job_id, error, outcome, reason in connection.execute(_FAILED, (since, JobState.FAILED))
    )
    return FinishedJobs(counts=counts, failed=failed)
