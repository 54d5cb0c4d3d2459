"""Group jobs that are submitted together, and order the groups. Pure.

- Jobs of one array with the same terms and the same dependencies are a *group*, which is an array again at sites that
  have arrays.
- A group comes after all groups that it depends on, otherwise by priority: sites without priorities start jobs in the
  order of their submission.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from gpuyard.core.cluster.export import ExportedJob
from gpuyard.core.job.lifecycle import JobState

# Slurm's default for the highest array index (MaxArraySize - 1).
_HIGHEST_NUMBER = 1000


class JobGroup(Struct, frozen=True, kw_only=True):
    """Jobs to submit together. `numbers` are the array indexes of the jobs, empty for a single job. `is_indexed`: they
    are the jobs' own indexes, and the commands differ only in that index."""

    jobs: tuple[ExportedJob, ...]
    numbers: tuple[int, ...] = ()
    is_indexed: bool = False

    @property
    def first(self) -> ExportedJob:
        return self.jobs[0]


# The group of each job, and the job's number in it, by the job's id.
Positions: TypeAlias = Mapping[int, tuple[JobGroup, int | None]]


def group_jobs(jobs: Iterable[ExportedJob]) -> list[JobGroup]:
    """Return the groups in the order of their submission."""
    alike: dict[tuple[object, ...], list[ExportedJob]] = {}
    for job in jobs:
        key = (job.terms, job.cwd, job.stdin, job.retries, job.grace_s, job.state is JobState.HELD, job.after)
        alike.setdefault(key if job.terms.group is not None else (job.id,), []).append(job)
    return _sort([group for each in alike.values() for group in _split(each)])


def _split(jobs: Sequence[ExportedJob]) -> Iterator[JobGroup]:
    indexes = [job.index for job in jobs if job.template is not None and job.index is not None]
    if len(jobs) == 1:
        yield JobGroup(jobs=tuple(jobs))
    elif len(indexes) == len(jobs) and max(indexes) <= _HIGHEST_NUMBER:
        yield JobGroup(jobs=tuple(jobs), numbers=tuple(indexes), is_indexed=True)
    else:
        for start in range(0, len(jobs), _HIGHEST_NUMBER):
            some = jobs[start : start + _HIGHEST_NUMBER]
            yield JobGroup(jobs=tuple(some), numbers=tuple(range(len(some))) if len(some) > 1 else ())


def _sort(groups: Sequence[JobGroup]) -> list[JobGroup]:
    """Sort by priority, then id. A dependency has a lower id than its dependants, and gets at least their priority."""
    group_of = {job.id: group for group in groups for job in group.jobs}
    priority = {group.first.id: group.first.terms.priority for group in groups}
    for group in sorted(groups, key=lambda each: each.first.id, reverse=True):
        for other in {group_of[each.job_id].first.id for each in group.first.after if each.job_id in group_of}:
            priority[other] = max(priority[other], priority[group.first.id])
    return sorted(groups, key=lambda each: (-priority[each.first.id], each.first.id))


def positions(groups: Iterable[JobGroup]) -> Positions:
    return {
        job.id: (group, group.numbers[place] if group.numbers else None)
        for group in groups
        for place, job in enumerate(group.jobs)
    }


def missing_dependencies(job: ExportedJob, ids: Collection[int]) -> list[int]:
    """Return the unmet dependencies of a job that are not in `ids`."""
    return [each.job_id for each in job.after if not each.is_met and each.job_id not in ids]
