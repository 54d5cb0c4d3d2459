"""What is told about jobs that are to go elsewhere for good: their commands, and on what terms they would be handed
over."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from msgspec import to_builtins

from gpuyard.core.cluster.export import pack
from gpuyard.core.job.lifecycle import WAITING
from gpuyard.core.job.selection import parse_selection
from gpuyard.daemon.loop import SchedulerLoop

_PAGE = 500


def page(scheduler: SchedulerLoop, ids: str, after: int) -> dict[str, Any]:
    """Those that are meant, or all that wait, in the order of their ids: some of them, from behind `after` on."""
    found = list(islice(_ids(scheduler, ids, after), _PAGE + 1))
    packed = [_packed(scheduler, job_id) for job_id in found[:_PAGE]]
    return {"jobs": packed, "next": found[_PAGE - 1] if len(found) > _PAGE else None}


def _ids(scheduler: SchedulerLoop, ids: str, after: int) -> Iterator[int]:
    ranges = scheduler.requests.stretches(parse_selection(ids)) if ids else [(1, scheduler.queries.last_id())]
    for first, last in ranges:
        yield from scheduler.queries.ids(max(first, after + 1), last, None if ids else sorted(WAITING))


def _packed(scheduler: SchedulerLoop, job_id: int) -> Any:
    job = scheduler.store.job(job_id)
    assert job is not None
    return to_builtins(
        pack(job, scheduler.controller.cluster_dispatch.terms(job_id), scheduler.store.dependencies(job_id))
    )
