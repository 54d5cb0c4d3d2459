"""Answers with jobs for another scheduler: their commands, and the resources with which they would be submitted."""

from collections.abc import Iterator
from itertools import islice

from gpuyard.core.cluster.export import ExportedJob, pack
from gpuyard.core.job.lifecycle import WAITING
from gpuyard.core.job.selection import parse_selection
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.schema.jobs import ExportPage

_PAGE = 500


def export_page(scheduler: SchedulerLoop, ids: str, after: int) -> ExportPage:
    """Return a page of the jobs with these ids, or of all that wait, ordered by id, from behind `after` on."""
    found = list(islice(_find_ids(scheduler, ids, after), _PAGE + 1))
    jobs = [_export(scheduler, job_id) for job_id in found[:_PAGE]]
    return ExportPage(jobs=jobs, next=found[_PAGE - 1] if len(found) > _PAGE else None)


def _find_ids(scheduler: SchedulerLoop, ids: str, after: int) -> Iterator[int]:
    ranges = scheduler.requests.id_ranges(parse_selection(ids)) if ids else [(1, scheduler.queries.last_id())]
    for first, last in ranges:
        yield from scheduler.queries.ids(max(first, after + 1), last, None if ids else sorted(WAITING))


def _export(scheduler: SchedulerLoop, job_id: int) -> ExportedJob:
    job = scheduler.store.job(job_id)
    assert job is not None
    return pack(job, scheduler.controller.cluster_dispatch.terms(job_id), scheduler.store.dependencies(job_id))
