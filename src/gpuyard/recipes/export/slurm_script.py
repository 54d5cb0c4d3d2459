"""A script that submits jobs to Slurm. Pure.

What is asked for is asked for in the words of the engine (`engines/cluster/slurm_commands.py`), but for what only a
queue can stand behind: how long jobs are expected to take is no limit here, as nobody would run again what it ends.
Dependencies and retries, which the engine leaves to the queue, are Slurm's.
"""

import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from msgspec.structs import replace

from gpuyard.core.cluster.export import ExportedJob, NotExported
from gpuyard.core.job.job import DEFAULT_GRACE_S, DependencyKind
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.selection import format_ids
from gpuyard.engines.cluster.site import ClusterSubmission
from gpuyard.engines.cluster.slurm_commands import SlurmSettings, submission
from gpuyard.recipes.export.job_groups import JobGroup, Places, blocks_of, outside, places_of
from gpuyard.recipes.export.script_text import Script, body, head, source, stays, with_input

_NAME = "slurm"
_HOW = (
    "Run it where `sbatch` is. Jobs get the environment of the shell that runs it, and write to slurm-*.out in its",
    "folder. Nodes must see the folders that jobs run in.",
)
_SUBMIT = """
# Its job here, then what sbatch is told.
submit() {
    name=$1
    shift
    id=$(sbatch --parsable "$@") || exit
    id=${id%%;*}
    eval "job_$name=$id"
    echo "$name: Slurm's job $id"
}
"""
# Stands in for the parcel of which there is none: what sbatch is told with it in it is the engine's own.
_NOWHERE = "/no/parcel"
_ENGINES_OWN = ("sbatch", "--parsable", "--no-requeue", "--export=ALL")
_KINDS = {DependencyKind.OK: "afterok", DependencyKind.ANY: "afterany", DependencyKind.FAILED: "afternotok"}


def slurm_script(jobs: Sequence[ExportedJob], settings: SlurmSettings, tags: Collection[str]) -> Script:
    """`tags` are those of which only so many jobs run at once here."""
    blocks = blocks_of(jobs)
    ids = {job.id for job in jobs}
    parts = Counter(block.first.terms.group for block in blocks)

    def not_there(job: ExportedJob) -> dict[NotExported, bool]:
        terms = job.terms
        return {
            NotExported.GRACE: job.grace_s != DEFAULT_GRACE_S,
            NotExported.OPTIONS: bool(terms.options) and job.engine != _NAME,
            NotExported.TAGS: job.tag in tags,
            NotExported.PRIORITY: terms.priority > settings.nice_base,
            NotExported.AT_ONCE: terms.at_most is not None and parts[terms.group] > 1,
            NotExported.SHARE: not terms.need.is_exclusive and any(map(_is_whole, _asked(job, settings))),
            NotExported.TIMED_OUT: bool(job.retries) and terms.limit_s is not None,
            NotExported.OUTSIDE: bool(outside(job, ids)),
        }

    notes = stays(jobs, not_there)
    lines = [*head("Slurm", jobs, _HOW, notes), *_SUBMIT.splitlines()]
    places = places_of(blocks)
    for block in blocks:
        lines += ["", *_submission(block, places, settings)]
    return Script(text="\n".join(lines) + "\n", notes=notes)


def _asked(job: ExportedJob, settings: SlurmSettings) -> list[str]:
    options = job.terms.options if job.engine == _NAME else ()
    terms = replace(job.terms, expected_s=None, options=options)
    parcel = ClusterSubmission(token=_NOWHERE, terms=terms, count=1, folder=_NOWHERE, supervisor=())
    return [word for word in submission(parcel, settings) if _NOWHERE not in word and word not in _ENGINES_OWN]


def _is_whole(word: str) -> bool:
    return word.startswith("--gres=gpu")


def _submission(block: JobGroup, places: Places, settings: SlurmSettings) -> Iterator[str]:
    first = block.first
    absent = outside(first, places)
    if absent:
        yield f"# It waits for {format_ids(absent)}, not in this script: `scontrol release` it when it may start."
    words = [*_array(block), *_asked(first, settings), *_retrying(first)]
    if absent or first.state is JobState.HELD:
        words.append("--hold")
    command = f"submit {first.id} {shlex.join(words)}{_dependency(first, places)}"
    yield from with_input(command, ["#!/bin/sh", *body(block, '"$SLURM_ARRAY_TASK_ID"'), *_running(block)])


def _array(block: JobGroup) -> Iterator[str]:
    if block.numbers:
        numbers = format_ids(block.numbers).replace(" ", ",")
        at_most = block.first.terms.at_most
        yield f"--array={numbers}" + (f"%{at_most}" if at_most else "")


def _retrying(job: ExportedJob) -> tuple[str, ...]:
    return ("--requeue", "--open-mode=append") if job.retries else ("--no-requeue",)


def _dependency(job: ExportedJob, places: Places) -> str:
    """Of the jobs of an array each has a name there, and all together have one."""
    wanted: dict[tuple[DependencyKind, int], list[int | None]] = {}
    for each in job.after:
        if each.job_id in places:
            other, number = places[each.job_id]
            wanted.setdefault((each.kind, other.first.id), []).append(number)
    names: dict[DependencyKind, list[str]] = {}
    for (kind, name), numbers in wanted.items():
        is_whole = len(numbers) == len(places[name][0].jobs)
        names.setdefault(kind, []).extend([f"$job_{name}"] if is_whole else [f"${{job_{name}}}_{n}" for n in numbers])
    if not names:
        return ""
    told = ",".join(":".join([_KINDS[kind], *some]) for kind, some in names.items())
    return f' --kill-on-invalid-dep=yes "--dependency={told}"'


def _running(block: JobGroup) -> Iterator[str]:
    retries, reads = block.first.retries, source(block)
    if not retries:
        yield f'exec "$@"{reads}'
        return
    yield f'"$@"{reads} && exit'
    yield "status=$?"
    yield f'[ "${{SLURM_RESTART_COUNT:-0}}" -ge {retries} ] || scontrol requeue "$SLURM_JOB_ID"'
    yield 'exit "$status"'
