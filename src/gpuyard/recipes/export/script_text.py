"""What scripts for all sites have in common: their head, how a job's command is written down, and what is told of what
they cannot do. Pure.

Every word of a command is quoted for the shell, and is as it was when the program gets it. Values of variables are
never written: they may be secrets.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count

from msgspec import Struct

from gpuyard.core.cluster.export import NOT_EXPORTED_TEXT, ExportedJob, NotExported
from gpuyard.core.job.selection import format_ids
from gpuyard.recipes.export.job_groups import JobGroup

_INDEX = "{index}"
_LONGEST_LIST = 60


class Script(Struct, frozen=True, kw_only=True):
    """`notes` are what the site will not do, one of a kind."""

    text: str
    notes: tuple[str, ...] = ()


def stays(jobs: Sequence[ExportedJob], more: Callable[[ExportedJob], Mapping[NotExported, bool]]) -> tuple[str, ...]:
    """What is not carried over, by `more` at that site besides, and for which jobs."""
    found: dict[NotExported, list[int]] = {}
    for job in jobs:
        there = (what for what, is_so in more(job).items() if is_so)
        for what in (*job.stays, *there):
            found.setdefault(what, []).append(job.id)
    return tuple(f"{_jobs(found[what], len(jobs))}: {NOT_EXPORTED_TEXT[what]}" for what in NotExported if what in found)


def _jobs(ids: Sequence[int], of_all: int) -> str:
    if len(ids) == of_all:
        return "all jobs"
    told = format_ids(ids)
    if len(told) > _LONGEST_LIST:
        told = f"{told[:_LONGEST_LIST].rpartition(' ')[0]} and others"
    return f"{'job' if len(ids) == 1 else 'jobs'} {told}"


def head(site: str, jobs: Sequence[ExportedJob], how: Iterable[str], notes: Iterable[str]) -> Iterator[str]:
    yield "#!/bin/sh"
    yield f"# Submits {f'{len(jobs)} jobs' if len(jobs) > 1 else 'a job'} of a gpuyard queue to {site}."
    yield from (f"# {line}" for line in how)
    yield "#"
    yield "# Not carried over:"
    yield from (f"# - {note}" for note in notes)
    yield "set -eu"


def body(block: JobGroup, number: str) -> Iterator[str]:
    """Goes to where the jobs run, and makes the command of one of them what `"$@"` is. `number` stands for its number
    in the block, as the shell has it."""
    yield f"cd {shlex.quote(block.first.cwd)} || exit"
    if not block.numbers:
        yield from _choose(block.first)
    elif block.is_counted:
        yield f"export GPUYARD_ARRAY_INDEX={number}"
        yield f"set -- {_counted(block.first.template or ())}"
    else:
        yield f"case {number} in"
        for job, each in zip(block.jobs, block.numbers, strict=True):
            yield f"{each}) {'; '.join(_choose(job))} ;;"
        yield "esac"


def _choose(job: ExportedJob) -> Iterator[str]:
    if job.index is not None:
        yield f"export GPUYARD_ARRAY_INDEX={job.index}"
    if job.folder is not None:
        yield f"mkdir -p -- {shlex.quote(job.folder)} || exit"
    yield f"set -- {shlex.join(job.argv)}"


def _counted(words: Sequence[str]) -> str:
    return " ".join('"$GPUYARD_ARRAY_INDEX"'.join(_quoted(word.split(_INDEX))) for word in words)


def _quoted(parts: Sequence[str]) -> Iterator[str]:
    """An empty word is quoted as well, but nothing is wanted around what stands for the index."""
    return (shlex.quote(part) if part or len(parts) == 1 else "" for part in parts)


def source(block: JobGroup) -> str:
    """What its jobs read."""
    return "" if block.first.stdin is None else f" < {shlex.quote(block.first.stdin)}"


def with_input(command: str, lines: Sequence[str]) -> Iterator[str]:
    """The command with these lines as its input; a word that spans lines may hold whatever would end them."""
    taken = {line for each in lines for line in each.split("\n")}
    end = next(word for word in (f"END{number or ''}" for number in count()) if word not in taken)
    yield f"{command} <<'{end}'"
    yield from lines
    yield end
