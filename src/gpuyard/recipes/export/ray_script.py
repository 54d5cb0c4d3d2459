"""Write a script that submits jobs to Ray. Pure.

Resources are requested as the engine requests them (`engines/cluster/ray_api.py`). Ray has no arrays, dependencies,
retries or time limits: the script submits each job by itself and waits for dependencies, and the shell script of each
job retries the command and limits its time.

Many versions of `ray job submit` corrupt arguments with spaces, quotes or dollars. So each command is in a file that is
uploaded with its job, and Ray gets only plain arguments.
"""

import json
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec.structs import replace

from gpuyard.config import RayConfig
from gpuyard.core.cluster.export import ExportedJob, NotExported
from gpuyard.core.cluster.offer import gpu_count
from gpuyard.core.job.dependencies import DependencyKind
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.selection import format_ids
from gpuyard.engines.cluster.ray_api import address_of, request_of
from gpuyard.engines.cluster.site import ClusterSubmission
from gpuyard.recipes.export import script_text
from gpuyard.recipes.export.script_text import JobGroup, Script, missing_dependencies

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
    """Return the script. `tags` are those with a limit on jobs that run at once."""
    groups = script_text.group_jobs(jobs)
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
    notes = script_text.loss_notes(jobs, _RAY, tags, find_losses)
    lines = [*script_text.script_head("Ray", jobs, _RAY_HOW, notes)]
    # The user of the script may have set the address.
    lines.append(f'[ -n "${{RAY_API_SERVER_ADDRESS:-}}" ] || RAY_API_SERVER_ADDRESS={default}')
    lines += ["export RAY_API_SERVER_ADDRESS", *_RAY_SUBMIT.splitlines()]
    if any(each.job_id in ids for job in jobs for each in job.after):
        lines += _AWAIT.splitlines()
    for group in groups:
        content = [*script_text.set_command(group, '"$1"'), *_run_in_ray(group)]
        lines += ["", *script_text.here_document(f'cat > "$folder/jobs/{group.first.id}.sh"', content)]
    return Script(text="\n".join([*lines, "", *_ray_submissions(groups, ids, settings)]) + "\n", notes=notes)


def _run_in_ray(group: JobGroup) -> Iterator[str]:
    first = group.first
    limit_s = first.terms.limit_s
    limit = "" if limit_s is None else f"timeout -k {first.grace_s:g} {limit_s:g} "
    command = f'{limit}"$@"{script_text.redirect_input(group)}'
    if not first.retries:
        yield f"exec {command}"
        return
    yield f"tries={first.retries + 1}"
    yield 'while [ "$tries" -gt 0 ]; do'
    yield f"    {command} && exit"
    yield "    status=$?"
    yield "    tries=$((tries - 1))"
    yield "done"
    yield 'exit "$status"'


def _ray_submissions(groups: Sequence[JobGroup], ids: Collection[int], settings: RayConfig) -> Iterator[str]:
    """Yield groups without dependencies first, because the script blocks on the others. Groups that are held, or that
    depend on jobs that the script does not submit, are commented out."""
    not_submitted: set[int] = set()
    for group in sorted(groups, key=lambda each: bool(_condition(each.first, ids))):
        first = group.first
        missing = missing_dependencies(first, ids)
        missing += [each.job_id for each in first.after if each.job_id in not_submitted]
        lines = _ray_submission(group, _condition(first, ids), _ray_options(first, settings))
        if not missing and first.state is not JobState.HELD:
            yield from lines
            continue
        yield f"# Wait for {format_ids(missing)}, not submitted here:" if missing else "# Held:"
        yield from (f"# {line}" for line in lines)
        not_submitted.update(job.id for job in group.jobs)


def _ray_submission(group: JobGroup, condition: str, options: Iterable[str]) -> Iterator[str]:
    arguments = [*options, "--", "sh", f"{group.first.id}.sh"]
    numbers = [[str(number)] for number in group.numbers] or [[]]
    lines = [
        f"submit {shlex.join([str(job.id), *arguments, *number])}"
        for job, number in zip(group.jobs, numbers, strict=True)
    ]
    if not condition:
        yield from lines
        return
    ids = format_ids(job.id for job in group.jobs)
    yield f"if {condition}; then"
    yield from (f"    {line}" for line in lines)
    yield "else"
    yield f"    echo '{ids}: not submitted: a dependency did not end as required' >&2"
    yield "fi"


def _condition(job: ExportedJob, ids: Collection[int]) -> str:
    kinds: dict[DependencyKind, list[int]] = {}
    for each in job.after:
        if each.job_id in ids:
            kinds.setdefault(each.kind, []).append(each.job_id)
    return " && ".join(f"ended {kind} {' '.join(map(str, others))}" for kind, others in kinds.items())


def _ray_options(job: ExportedJob, settings: RayConfig) -> Iterator[str]:
    terms = replace(job.terms, options=job.terms.options if job.engine == _RAY else ())
    placeholder = ClusterSubmission(token="", terms=terms, count=1, folder="", supervisor=())
    for field, value in request_of(placeholder, 0, settings.card_mb).items():
        if field.startswith("entrypoint_"):
            text = json.dumps(value) if isinstance(value, dict) else value
            yield f"--{field.replace('_', '-')}={text}"
