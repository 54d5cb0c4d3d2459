"""The common parts of scripts for all sites: the head, a job's command, and notes about what is not exported. Pure.

Every argument of a command is quoted for the shell, so that the program gets it unchanged. Values of environment
variables are never written: they may be secrets.
"""

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count

from msgspec import Struct

from gpuyard.core.cluster.export import ExportedJob, NotExported
from gpuyard.core.job.job import DEFAULT_GRACE_S
from gpuyard.core.job.selection import format_ids
from gpuyard.recipes.export.job_groups import JobGroup, missing_dependencies

_INDEX = "{index}"
_LONGEST_LIST = 60


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
    """Yield lines that change to the jobs' folder and set `"$@"` to the command of one job. `number` is the shell
    expression for its number in the group."""
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
    return " ".join('"$GPUYARD_ARRAY_INDEX"'.join(_quote_parts(argument.split(_INDEX))) for argument in arguments)


def _quote_parts(parts: Sequence[str]) -> Iterator[str]:
    """Quote the parts around an index. An empty argument is quoted, an empty part beside the index is not."""
    return (shlex.quote(part) if part or len(parts) == 1 else "" for part in parts)


def redirect_input(group: JobGroup) -> str:
    return "" if group.first.stdin is None else f" < {shlex.quote(group.first.stdin)}"


def here_document(command: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield the command with these lines as its input. The delimiter differs from all lines, those inside quoted
    arguments included."""
    taken = {line for each in lines for line in each.split("\n")}
    end = next(word for word in (f"END{number or ''}" for number in count()) if word not in taken)
    yield f"{command} <<'{end}'"
    yield from lines
    yield end
