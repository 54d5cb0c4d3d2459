"""Jobs that are submitted together, and in which order. Pure.

- Jobs of one array that have the same terms and wait for the same others are a *block*, and one array again where there
  are arrays.
- A block comes after all that it waits for, and else by its priority: whoever knows no priorities begins with what came
  first.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from gpuyard.core.cluster.export import ExportedJob
from gpuyard.core.job.lifecycle import JobState

# Slurm takes none that is higher, unless its site says otherwise (MaxArraySize).
_HIGHEST_NUMBER = 1000


class JobGroup(Struct, frozen=True, kw_only=True):
    """`numbers` are those of its jobs within it, none where it is a single one: their indexes where it `is_counted`,
    and its command tells its jobs apart by that alone."""

    jobs: tuple[ExportedJob, ...]
    numbers: tuple[int, ...] = ()
    is_counted: bool = False

    @property
    def first(self) -> ExportedJob:
        return self.jobs[0]


# Where each job is: its block, and its number in that.
Places: TypeAlias = Mapping[int, tuple[JobGroup, int | None]]


def blocks_of(jobs: Iterable[ExportedJob]) -> list[JobGroup]:
    """In the order in which they are to be submitted."""
    alike: dict[tuple[object, ...], list[ExportedJob]] = {}
    for job in jobs:
        key = (job.terms, job.cwd, job.stdin, job.retries, job.grace_s, job.state is JobState.HELD, job.after)
        alike.setdefault(key if job.terms.group is not None else (job.id,), []).append(job)
    return _in_order([block for each in alike.values() for block in _cut(each)])


def _cut(jobs: Sequence[ExportedJob]) -> Iterator[JobGroup]:
    indexes = [job.index for job in jobs if job.template is not None and job.index is not None]
    if len(jobs) == 1:
        yield JobGroup(jobs=tuple(jobs))
    elif len(indexes) == len(jobs) and max(indexes) <= _HIGHEST_NUMBER:
        yield JobGroup(jobs=tuple(jobs), numbers=tuple(indexes), is_counted=True)
    else:
        for begin in range(0, len(jobs), _HIGHEST_NUMBER):
            some = jobs[begin : begin + _HIGHEST_NUMBER]
            yield JobGroup(jobs=tuple(some), numbers=tuple(range(len(some))) if len(some) > 1 else ())


def _in_order(blocks: Sequence[JobGroup]) -> list[JobGroup]:
    """What a job waits for has a lower id; and here also no lower priority."""
    whose = {job.id: block for block in blocks for job in block.jobs}
    priority = {block.first.id: block.first.terms.priority for block in blocks}
    for block in sorted(blocks, key=lambda each: each.first.id, reverse=True):
        for other in {whose[each.job_id].first.id for each in block.first.after if each.job_id in whose}:
            priority[other] = max(priority[other], priority[block.first.id])
    return sorted(blocks, key=lambda each: (-priority[each.first.id], each.first.id))


def places_of(blocks: Iterable[JobGroup]) -> Places:
    return {
        job.id: (block, block.numbers[place] if block.numbers else None)
        for block in blocks
        for place, job in enumerate(block.jobs)
    }


def outside(job: ExportedJob, ids: Collection[int]) -> list[int]:
    """Those that it waits for and that are not among these."""
    return [each.job_id for each in job.after if not each.is_met and each.job_id not in ids]
