"""Write a script that submits jobs to Slurm. Pure.

Resources are requested as the engine requests them (`engines/cluster/slurm_commands.py`), with one exception: the
expected duration is not a time limit here, because no queue would run again a job that Slurm stops for it. Slurm itself
handles dependencies and retries, which the engine leaves to the queue.
"""

import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from msgspec.structs import replace

from gpuyard.config import SlurmConfig
from gpuyard.core.cluster.export import ExportedJob, NotExported
from gpuyard.core.job.dependencies import DependencyKind
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.selection import format_ids
from gpuyard.engines.cluster.site import ClusterSubmission
from gpuyard.engines.cluster.slurm_commands import submit_command
from gpuyard.recipes.export import script_text
from gpuyard.recipes.export.script_text import JobGroup, Script, missing_dependencies

_SLURM = "slurm"
_SLURM_HOW = (
    "Run it where `sbatch` is installed. Jobs get the environment of the shell that runs it, and write to slurm-*.out",
    "in its folder. Nodes must see the folders that jobs run in.",
)
_SLURM_SUBMIT = """
# Usage: submit GPUYARD_JOB SBATCH_OPTIONS...
submit() {
    name=$1
    shift
    id=$(sbatch --parsable "$@") || exit
    id=${id%%;*}
    eval "job_$name=$id"
    echo "$name: Slurm's job $id"
}
"""
# Stands for the engine's submission folder: arguments that contain it are for the engine only.
_NO_FOLDER = "/no/folder"
_ENGINE_ONLY = ("sbatch", "--parsable", "--no-requeue", "--export=ALL")
_KINDS = {DependencyKind.OK: "afterok", DependencyKind.ANY: "afterany", DependencyKind.FAILED: "afternotok"}


def slurm_script(jobs: Sequence[ExportedJob], settings: SlurmConfig, tags: Collection[str]) -> Script:
    """Return the script. `tags` are those with a limit on jobs that run at once."""
    groups = script_text.group_jobs(jobs)
    group_counts = Counter(group.first.terms.group for group in groups)

    def find_losses(job: ExportedJob) -> dict[NotExported, bool]:
        terms = job.terms
        has_whole_gpus = any(option.startswith("--gres=gpu") for option in _slurm_options(job, settings))
        return {
            NotExported.PRIORITY: terms.priority > settings.nice_base,
            NotExported.AT_ONCE: terms.at_most is not None and group_counts[terms.group] > 1,
            NotExported.SHARE: not terms.need.is_exclusive and has_whole_gpus,
            NotExported.TIMED_OUT: bool(job.retries) and terms.limit_s is not None,
            NotExported.ONE_FAILED: _mixes_kinds(job),
        }

    notes = script_text.loss_notes(jobs, _SLURM, tags, find_losses)
    lines = [*script_text.script_head("Slurm", jobs, _SLURM_HOW, notes), *_SLURM_SUBMIT.splitlines()]
    by_id = script_text.positions(groups)
    for group in groups:
        lines += ["", *_slurm_submission(group, by_id, settings)]
    return Script(text="\n".join(lines) + "\n", notes=notes)


def _mixes_kinds(job: ExportedJob) -> bool:
    """Return whether one of several jobs has to fail, and others have to end too: Slurm cannot mix "or" and "and"."""
    kinds = [each.kind for each in job.after if not each.is_met]
    return kinds.count(DependencyKind.FAILED) > 1 and len(set(kinds)) > 1


def _slurm_options(job: ExportedJob, settings: SlurmConfig) -> list[str]:
    options = job.terms.options if job.engine == _SLURM else ()
    terms = replace(job.terms, expected_s=None, options=options, warning=None)
    placeholder = ClusterSubmission(token=_NO_FOLDER, terms=terms, count=1, folder=_NO_FOLDER, supervisor=())
    arguments = submit_command(placeholder, settings)
    return [argument for argument in arguments if _NO_FOLDER not in argument and argument not in _ENGINE_ONLY]


def _slurm_submission(group: JobGroup, by_id: script_text.Positions, settings: SlurmConfig) -> Iterator[str]:
    first = group.first
    missing = missing_dependencies(first, by_id)
    if missing:
        yield f"# It waits for {format_ids(missing)}, not in this script: `scontrol release` it when it may start."
    options = _slurm_options(first, settings)
    if group.numbers:
        at_most = f"%{first.terms.at_most}" if first.terms.at_most else ""
        options.insert(0, f"--array={format_ids(group.numbers).replace(' ', ',')}{at_most}")
    options += ["--requeue", "--open-mode=append"] if first.retries else ["--no-requeue"]
    if missing or first.state is JobState.HELD:
        options.append("--hold")
    command = f"submit {first.id} {shlex.join(options)}{_dependency(first, by_id)}"
    content = ["#!/bin/sh", *script_text.set_command(group, '"$SLURM_ARRAY_TASK_ID"'), *_run_in_slurm(group)]
    yield from script_text.here_document(command, content)


def _dependency(job: ExportedJob, by_id: script_text.Positions) -> str:
    """Return the dependency option. It names a whole array by its own id, or single jobs of it by id and index."""
    wanted: dict[tuple[DependencyKind, int], list[int | None]] = {}
    for each in job.after:
        if each.job_id in by_id:
            other, number = by_id[each.job_id]
            wanted.setdefault((each.kind, other.first.id), []).append(number)
    names: dict[DependencyKind, list[str]] = {}
    for (kind, name), numbers in wanted.items():
        is_whole = len(numbers) == len(by_id[name][0].jobs)
        names.setdefault(kind, []).extend([f"$job_{name}"] if is_whole else [f"${{job_{name}}}_{n}" for n in numbers])
    if not names:
        return ""
    failed = names.get(DependencyKind.FAILED, [])
    if len(names) == 1 and len(failed) > 1:  # one of them has to fail
        conditions = "?".join(f"{_KINDS[DependencyKind.FAILED]}:{each}" for each in failed)
    else:
        conditions = ",".join(":".join([_KINDS[kind], *some]) for kind, some in names.items())
    return f' --kill-on-invalid-dep=yes "--dependency={conditions}"'


def _run_in_slurm(group: JobGroup) -> Iterator[str]:
    retries, redirection = group.first.retries, script_text.redirect_input(group)
    if not retries:
        yield f'exec "$@"{redirection}'
        return
    yield f'"$@"{redirection} && exit'
    yield "status=$?"
    yield f'[ "${{SLURM_RESTART_COUNT:-0}}" -ge {retries} ] || scontrol requeue "$SLURM_JOB_ID"'
    yield 'exit "$status"'
