"""The common parts of scripts for all sites. Pure. Jobs of one array with the same terms and the same dependencies are
a *group*, which is an array again at sites that have arrays. A group comes after all that it depends on, otherwise by
priority. Values of environment variables are never written: they may be secrets."""

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import TypeAlias

from msgspec import Struct

from gpuyard.model.exported_job import ExportedJob, NotExported
from gpuyard.model.job_spec import DEFAULT_GRACE_S
from gpuyard.model.lifecycle import JobState
from gpuyard.model.selection import format_ids

_INDEX = "{index}"
_LONGEST_LIST = 60
# Slurm's default for the highest array index (MaxArraySize - 1).
_HIGHEST_NUMBER = 1000


class JobGroup(Struct, frozen=True, kw_only=True):
    """Jobs to submit together. `numbers` are array indexes, empty for a single job. `is_indexed`: they are the jobs'
    own indexes, and the commands differ only in that index."""

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


class Script(Struct, frozen=True, kw_only=True):
    """`notes` list what the script does not carry over, one note per kind."""

    text: str
    notes: tuple[str, ...] = ()


def loss_notes(
    jobs: Sequence[ExportedJob],
    engine: str,
    tags: Collection[str],
    find_losses: Callable[[ExportedJob], Mapping[NotExported, bool]],
) -> tuple[str, ...]:
    """Return what is not carried over, each with its jobs. `find_losses` adds what is special to the site."""
    ids = {job.id for job in jobs}
    found: dict[NotExported, list[int]] = {}
    for job in jobs:
        losses = {
            NotExported.GRACE: job.grace_s != DEFAULT_GRACE_S,
            NotExported.OPTIONS: bool(job.terms.options) and job.engine != engine,
            NotExported.TAGS: job.tag in tags,
            NotExported.OUTSIDE: bool(missing_dependencies(job, ids)),
            **find_losses(job),
        }
        for loss in (*job.stays, *(loss for loss, applies in losses.items() if applies)):
            found.setdefault(loss, []).append(job.id)
    return tuple(f"{_name_jobs(found[loss], len(jobs))}: {loss.description}" for loss in NotExported if loss in found)


def _name_jobs(ids: Sequence[int], total: int) -> str:
    if len(ids) == total:
        return "all jobs"
    text = format_ids(ids)
    if len(text) > _LONGEST_LIST:
        text = f"{text[:_LONGEST_LIST].rpartition(' ')[0]} and others"
    return f"{'job' if len(ids) == 1 else 'jobs'} {text}"


def script_head(site: str, jobs: Sequence[ExportedJob], how: Iterable[str], notes: Iterable[str]) -> Iterator[str]:
    yield "#!/bin/sh"
    yield f"# Submits {f'{len(jobs)} jobs' if len(jobs) > 1 else 'a job'} of a gpuyard queue to {site}."
    yield from (f"# {line}" for line in how)
    yield "#"
    yield "# Not carried over:"
    yield from (f"# - {note}" for note in notes)
    yield "set -eu"


def set_command(group: JobGroup, number: str) -> Iterator[str]:
    """Yield lines that set `"$@"` to the command of one job. `number` is the shell expression for its number in the
    group."""
    yield f"cd {shlex.quote(group.first.cwd)} || exit"
    if not group.numbers:
        yield from _set_job_command(group.first)
    elif group.is_indexed:
        yield f"export GPUYARD_ARRAY_INDEX={number}"
        yield f"set -- {_quote_template(group.first.template or ())}"
    else:
        yield f"case {number} in"
        for job, each in zip(group.jobs, group.numbers, strict=True):
            yield f"{each}) {'; '.join(_set_job_command(job))} ;;"
        yield "esac"


def _set_job_command(job: ExportedJob) -> Iterator[str]:
    if job.index is not None:
        yield f"export GPUYARD_ARRAY_INDEX={job.index}"
    if job.folder is not None:
        yield f"mkdir -p -- {shlex.quote(job.folder)} || exit"
    yield f"set -- {shlex.join(job.argv)}"


def _quote_template(arguments: Sequence[str]) -> str:
    """Quote the parts around each index. An empty argument is quoted, an empty part beside the index is not."""
    words = []
    for argument in arguments:
        parts = argument.split(_INDEX)
        quoted = [shlex.quote(part) if part or len(parts) == 1 else "" for part in parts]
        words.append('"$GPUYARD_ARRAY_INDEX"'.join(quoted))
    return " ".join(words)


def redirect_input(group: JobGroup) -> str:
    return "" if group.first.stdin is None else f" < {shlex.quote(group.first.stdin)}"


def here_document(command: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield the command with these lines as its input. The delimiter differs from all lines, also those inside
    arguments."""
    taken = {line for each in lines for line in each.split("\n")}
    end = next(word for word in (f"END{number or ''}" for number in count()) if word not in taken)
    yield f"{command} <<'{end}'"
    yield from lines
    yield end
