"""Delete old finished jobs, in pieces."""

from gpuyard.control.add_submission import InPieces
from gpuyard.store.job_store import JobStore
from gpuyard.store.old_jobs import FinishedJob
from gpuyard.store.queue_queries import QueueQueries

_PIECE = 50


def delete_finished(store: JobStore, queries: QueueQueries, before: float) -> InPieces[list[FinishedJob]]:
    """Delete the jobs that ended before this time and that no other job needs; return them."""
    newest = FinishedJob(0, 0, before)
    gone: list[FinishedJob] = []
    while found := (yield from _delete_once(store, queries, newest)):
        gone += found
    with store.transaction():
        queries.old_jobs.delete_old_profiles()
    return gone


def _delete_once(store: JobStore, queries: QueueQueries, after: FinishedJob) -> InPieces[list[FinishedJob]]:
    """Delete jobs that ended earlier. A job that another job needs, which is deleted later, stays for the next pass."""
    gone: list[FinishedJob] = []
    while page := queries.old_jobs.page(after, _PIECE):
        after = page[-1]
        if deletable := queries.old_jobs.deletable(page):
            with store.transaction():
                queries.old_jobs.delete([job.id for job in deletable])
            gone += deletable
        yield
    return gone
