"""Write a script that submits jobs to Slurm or to Ray. Pure. Resources are requested as the engines request them.

- Jobs of one array with the same terms and the same dependencies are a *group*, an array again in Slurm. A group comes
  after all that it depends on, otherwise by priority.
- Values of environment variables are never written: they may be secrets.
- Slurm itself handles dependencies and retries here, and the expected duration is not a time limit, because no queue
  would run again a job that Slurm stops for it. Ray has no arrays, dependencies, retries or time limits: the script
  waits for dependencies, and the shell script of each job retries the command and limits its time.
- Many versions of `ray job submit` corrupt arguments with spaces, quotes or dollars, so each command is in a file that
  is uploaded with its job.
"""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.config import RayConfig, SlurmConfig
from gpuyard.engines.cluster.ray_api import address_of, request_of
from gpuyard.engines.cluster.site import ClusterSubmission
from gpuyard.engines.cluster.slurm_commands import submit_command
from gpuyard.model.cluster_terms import gpu_count
from gpuyard.model.dependencies import DependencyKind
from gpuyard.model.exported_job import ExportedJob, NotExported
from gpuyard.model.job_spec import DEFAULT_GRACE_S
from gpuyard.model.lifecycle import JobState
from gpuyard.model.selection import format_ids

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
    groups = [group for each in alike.values() for group in _split(each)]
    # By priority, then id. A dependency has a lower id than its dependants, and gets at least their priority.
    group_of = {job.id: group for group in groups for job in group.jobs}
    priority = {group.first.id: group.first.terms.priority for group in groups}
    for group in sorted(groups, key=lambda each: each.first.id, reverse=True):
        for other in {group_of[each.job_id].first.id for each in group.first.after if each.job_id in group_of}:
            priority[other] = max(priority[other], priority[group.first.id])
    return sorted(groups, key=lambda each: (-priority[each.first.id], each.first.id))


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
    if len(text) > 60:
        text = f"{text[:60].rpartition(' ')[0]} and others"
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
        words = []
        for argument in group.first.template or ():
            parts = argument.split("{index}")
            # An empty argument is quoted, an empty part beside the index is not.
            quoted = [shlex.quote(part) if part or len(parts) == 1 else "" for part in parts]
            words.append('"$GPUYARD_ARRAY_INDEX"'.join(quoted))
        yield f"export GPUYARD_ARRAY_INDEX={number}"
        yield f"set -- {' '.join(words)}"
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
    groups = group_jobs(jobs)
    group_counts = Counter(group.first.terms.group for group in groups)

    def find_losses(job: ExportedJob) -> dict[NotExported, bool]:
        terms = job.terms
        has_whole_gpus = any(option.startswith("--gres=gpu") for option in _slurm_options(job, settings))
        kinds = [each.kind for each in job.after if not each.is_met]
        return {
            NotExported.PRIORITY: terms.priority > settings.nice_base,
            NotExported.AT_ONCE: terms.at_most is not None and group_counts[terms.group] > 1,
            NotExported.SHARE: not terms.need.is_exclusive and has_whole_gpus,
            NotExported.TIMED_OUT: bool(job.retries) and terms.limit_s is not None,
            # One of several jobs has to fail, and others have to end too: Slurm cannot mix "or" and "and".
            NotExported.ONE_FAILED: kinds.count(DependencyKind.FAILED) > 1 and len(set(kinds)) > 1,
        }

    notes = loss_notes(jobs, _SLURM, tags, find_losses)
    lines = [*script_head("Slurm", jobs, _SLURM_HOW, notes), *_SLURM_SUBMIT.splitlines()]
    by_id: Positions = {
        job.id: (group, group.numbers[place] if group.numbers else None)
        for group in groups
        for place, job in enumerate(group.jobs)
    }
    for group in groups:
        lines += ["", *_slurm_submission(group, by_id, settings)]
    return Script(text="\n".join(lines) + "\n", notes=notes)


def _slurm_options(job: ExportedJob, settings: SlurmConfig) -> list[str]:
    options = job.terms.options if job.engine == _SLURM else ()
    terms = replace(job.terms, expected_s=None, options=options, warning=None)
    placeholder = ClusterSubmission(token=_NO_FOLDER, terms=terms, count=1, folder=_NO_FOLDER, supervisor=())
    arguments = submit_command(placeholder, settings)
    return [argument for argument in arguments if _NO_FOLDER not in argument and argument not in _ENGINE_ONLY]


def _slurm_submission(group: JobGroup, by_id: Positions, settings: SlurmConfig) -> Iterator[str]:
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
    content = ["#!/bin/sh", *set_command(group, '"$SLURM_ARRAY_TASK_ID"')]
    redirection = redirect_input(group)
    if first.retries:
        content += [f'"$@"{redirection} && exit', "status=$?"]
        content.append(f'[ "${{SLURM_RESTART_COUNT:-0}}" -ge {first.retries} ] || scontrol requeue "$SLURM_JOB_ID"')
        content.append('exit "$status"')
    else:
        content.append(f'exec "$@"{redirection}')
    yield from here_document(command, content)


def _dependency(job: ExportedJob, by_id: Positions) -> str:
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


_RAY = "ray"
_RAY_HOW = (
    "Run it where `ray` is installed; RAY_API_SERVER_ADDRESS is the dashboard's address. Jobs get the environment of",
    "Ray's nodes, which must see the folders that jobs run in. The script runs until all dependencies have ended.",
)
_RAY_SUBMIT = """
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
trap 'exit 1' HUP INT TERM
mkdir "$folder/jobs"
run=$(date +%s)-$$

# Usage: submit GPUYARD_JOB ARGUMENTS...
submit() {
    id=gpuyard-$1-$run
    shift
    ray job submit --no-wait --submission-id "$id" --working-dir "$folder/jobs" "$@" > "$folder/output" ||
        { cat "$folder/output" && exit 1; }
    echo "$id"
}
"""
_AWAIT = """
# ended ok|any JOB...: wait until the jobs have ended; status 0 if all ended as wanted.
# ended failed JOB...: wait until one of the jobs has failed; status 1 if all have ended and none failed.
ended() {
    wanted=$1
    shift
    for job; do
        id=gpuyard-$job-$run
        while :; do
            case $(ray job status "$id" 2>&1) in
            *"Job '$id' succeeded"*) break ;;
            *"Job '$id' failed"*)
                case $wanted in ok) return 1 ;; failed) return 0 ;; any) break ;; esac ;;
            *"Job '$id' was stopped"* | *"does not exist"*) [ "$wanted" != ok ] && break || return 1 ;;
            esac
            sleep 5
        done
    done
    [ "$wanted" != failed ]
}
"""


def ray_script(jobs: Sequence[ExportedJob], settings: RayConfig, tags: Collection[str]) -> Script:
    groups = group_jobs(jobs)
    ids = {job.id for job in jobs}

    def find_losses(job: ExportedJob) -> dict[NotExported, bool]:
        terms = job.terms
        return {
            NotExported.PRIORITY: terms.priority != 0,
            NotExported.AT_ONCE: terms.at_most is not None,
            NotExported.HELD: job.state is JobState.HELD,
            NotExported.SHARE: not terms.need.is_exclusive
            and gpu_count(terms.need, settings.card_mb) == terms.need.devices,
        }

    address = address_of(settings, {})
    default = shlex.quote(address) if settings.address is not None else f"${{RAY_ADDRESS:-{address}}}"
    notes = loss_notes(jobs, _RAY, tags, find_losses)
    lines = [*script_head("Ray", jobs, _RAY_HOW, notes)]
    # The user of the script may have set the address.
    lines.append(f'[ -n "${{RAY_API_SERVER_ADDRESS:-}}" ] || RAY_API_SERVER_ADDRESS={default}')
    lines += ["export RAY_API_SERVER_ADDRESS", *_RAY_SUBMIT.splitlines()]
    if any(each.job_id in ids for job in jobs for each in job.after):
        lines += _AWAIT.splitlines()
    for group in groups:
        content = [*set_command(group, '"$1"'), *_run_in_ray(group)]
        lines += ["", *here_document(f'cat > "$folder/jobs/{group.first.id}.sh"', content)]
    return Script(text="\n".join([*lines, "", *_ray_submissions(groups, ids, settings)]) + "\n", notes=notes)


def _run_in_ray(group: JobGroup) -> list[str]:
    first = group.first
    limit_s = first.terms.limit_s
    limit = "" if limit_s is None else f"timeout -k {first.grace_s:g} {limit_s:g} "
    command = f'{limit}"$@"{redirect_input(group)}'
    if not first.retries:
        return [f"exec {command}"]
    loop = [f"    {command} && exit", "    status=$?", "    tries=$((tries - 1))", "done", 'exit "$status"']
    return [f"tries={first.retries + 1}", 'while [ "$tries" -gt 0 ]; do', *loop]


def _ray_submissions(groups: Sequence[JobGroup], ids: Collection[int], settings: RayConfig) -> Iterator[str]:
    """Yield groups without dependencies first, because the script blocks on the others. Groups that are held, or that
    depend on jobs that the script does not submit, are commented out."""
    not_submitted: set[int] = set()
    for group in sorted(groups, key=lambda each: bool(_condition(each.first, ids))):
        first = group.first
        missing = missing_dependencies(first, ids)
        missing += [each.job_id for each in first.after if each.job_id in not_submitted]
        terms = replace(first.terms, options=first.terms.options if first.engine == _RAY else ())
        placeholder = ClusterSubmission(token="", terms=terms, count=1, folder="", supervisor=())
        options = [
            f"--{field.replace('_', '-')}={json.dumps(value) if isinstance(value, dict) else value}"
            for field, value in request_of(placeholder, 0, settings.card_mb).items()
            if field.startswith("entrypoint_")
        ]
        lines = _ray_submission(group, _condition(first, ids), options)
        if not missing and first.state is not JobState.HELD:
            yield from lines
            continue
        yield f"# Wait for {format_ids(missing)}, not submitted here:" if missing else "# Held:"
        yield from (f"# {line}" for line in lines)
        not_submitted.update(job.id for job in group.jobs)


def _ray_submission(group: JobGroup, condition: str, options: Iterable[str]) -> list[str]:
    arguments = [*options, "--", "sh", f"{group.first.id}.sh"]
    numbers = [[str(number)] for number in group.numbers] or [[]]
    lines = [
        f"submit {shlex.join([str(job.id), *arguments, *number])}"
        for job, number in zip(group.jobs, numbers, strict=True)
    ]
    if not condition:
        return lines
    ids = format_ids(job.id for job in group.jobs)
    otherwise = ["else", f"    echo '{ids}: not submitted: a dependency did not end as required' >&2", "fi"]
    return [f"if {condition}; then", *(f"    {line}" for line in lines), *otherwise]


def _condition(job: ExportedJob, ids: Collection[int]) -> str:
    kinds: dict[DependencyKind, list[int]] = {}
    for each in job.after:
        if each.job_id in ids:
            kinds.setdefault(each.kind, []).append(each.job_id)
    return " && ".join(f"ended {kind} {' '.join(map(str, others))}" for kind, others in kinds.items())
