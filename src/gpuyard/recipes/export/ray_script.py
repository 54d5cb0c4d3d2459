"""A script that submits jobs to Ray. Pure.

What is asked for is asked for in the words of the engine (`engines/cluster/ray_api.py`). Ray has no arrays,
dependencies, retries and time limits: the script submits each job by itself and waits for what others wait for, and
what a job runs tries again and keeps its time.

Many versions of `ray job submit` spoil words with spaces, quotes or dollars in them. So a command is in a file, which
goes along with its job, and what Ray is told are plain words.
"""

import json
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec.structs import replace

from gpuyard.core.cluster.export import ExportedJob, NotExported
from gpuyard.core.cluster.offer import gpu_count
from gpuyard.core.job.job import DEFAULT_GRACE_S, DependencyKind
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.selection import format_ids
from gpuyard.engines.cluster.ray_api import RaySettings, address_of, submission_of
from gpuyard.engines.cluster.site import ClusterSubmission
from gpuyard.recipes.export.job_groups import JobGroup, blocks_of, outside
from gpuyard.recipes.export.script_text import Script, body, head, source, stays, with_input

_NAME = "ray"
_HOW = (
    "Run it where `ray` is; RAY_API_SERVER_ADDRESS names the dashboard. Jobs get the environment of Ray's nodes, which",
    "must see the folders that jobs run in. Where jobs wait for others, it takes as long as those do.",
)
_SUBMIT = """
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
trap 'exit 1' HUP INT TERM
mkdir "$folder/jobs"
run=$(date +%s)-$$

# Its job here, then what Ray is told.
submit() {
    id=gpuyard-$1-$run
    shift
    ray job submit --no-wait --submission-id "$id" --working-dir "$folder/jobs" "$@" > "$folder/told" ||
        { cat "$folder/told" && exit 1; }
    echo "$id"
}
"""
_AWAIT = """
# Whether these ended as wanted (ok, failed or any), once they have.
ended() {
    wanted=$1
    shift
    for job; do
        id=gpuyard-$job-$run
        while :; do
            case $(ray job status "$id" 2>&1) in
            *"Job '$id' succeeded"*) [ "$wanted" != failed ] && break || return 1 ;;
            *"Job '$id' failed"*) [ "$wanted" != ok ] && break || return 1 ;;
            *"Job '$id' was stopped"* | *"does not exist"*) [ "$wanted" = any ] && break || return 1 ;;
            esac
            sleep 5
        done
    done
}
"""


def ray_script(jobs: Sequence[ExportedJob], settings: RaySettings, tags: Collection[str]) -> Script:
    """`tags` are those of which only so many jobs run at once here."""
    blocks = blocks_of(jobs)
    ids = {job.id for job in jobs}

    def not_there(job: ExportedJob) -> dict[NotExported, bool]:
        terms = job.terms
        return {
            NotExported.GRACE: job.grace_s != DEFAULT_GRACE_S,
            NotExported.OPTIONS: bool(terms.options) and job.engine != _NAME,
            NotExported.TAGS: job.tag in tags,
            NotExported.PRIORITY: terms.priority != 0,
            NotExported.AT_ONCE: terms.at_most is not None,
            NotExported.HELD: job.state is JobState.HELD,
            NotExported.SHARE: not terms.need.is_exclusive
            and gpu_count(terms.need, settings.card_mb) == terms.need.devices,
            NotExported.OUTSIDE: bool(outside(job, ids)),
        }

    notes = stays(jobs, not_there)
    lines = [*head("Ray", jobs, _HOW, notes), *_address(settings), *_SUBMIT.splitlines()]
    if any(each.job_id in ids for job in jobs for each in job.after):
        lines += _AWAIT.splitlines()
    for block in blocks:
        lines += ["", *with_input(f'cat > "$folder/jobs/{_file(block)}"', [*body(block, '"$1"'), *_running(block)])]
    return Script(text="\n".join([*lines, "", *_submissions(blocks, ids, settings)]) + "\n", notes=notes)


def _address(settings: RaySettings) -> Iterator[str]:
    """Whoever runs it may name another."""
    address = address_of(settings, {})
    told = shlex.quote(address) if settings.address is not None else f"${{RAY_ADDRESS:-{address}}}"
    yield f'[ -n "${{RAY_API_SERVER_ADDRESS:-}}" ] || RAY_API_SERVER_ADDRESS={told}'
    yield "export RAY_API_SERVER_ADDRESS"


def _file(block: JobGroup) -> str:
    return f"{block.first.id}.sh"


def _running(block: JobGroup) -> Iterator[str]:
    first = block.first
    limit_s = first.terms.limit_s
    bound = "" if limit_s is None else f"timeout -k {first.grace_s:g} {limit_s:g} "
    command = f'{bound}"$@"{source(block)}'
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


def _submissions(blocks: Sequence[JobGroup], ids: Collection[int], settings: RaySettings) -> Iterator[str]:
    """Those that wait for nothing first, as the script waits with the others; what waits for what is not submitted
    cannot be either."""
    shut: set[int] = set()
    for block in sorted(blocks, key=lambda each: bool(_condition(each.first, ids))):
        first = block.first
        absent = [*outside(first, ids), *(each.job_id for each in first.after if each.job_id in shut)]
        lines = _submission(block, _condition(first, ids), _asked(first, settings))
        if not absent and first.state is not JobState.HELD:
            yield from lines
            continue
        yield f"# Wait for {format_ids(absent)}, not submitted here:" if absent else "# Held:"
        yield from (f"# {line}" for line in lines)
        shut.update(job.id for job in block.jobs)


def _submission(block: JobGroup, condition: str, asked: Iterable[str]) -> Iterator[str]:
    told = [*asked, "--", "sh", _file(block)]
    numbers = [[str(number)] for number in block.numbers] or [[]]
    lines = [
        f"submit {shlex.join([str(job.id), *told, *number])}" for job, number in zip(block.jobs, numbers, strict=True)
    ]
    if not condition:
        yield from lines
        return
    ids = format_ids(job.id for job in block.jobs)
    yield f"if {condition}; then"
    yield from (f"    {line}" for line in lines)
    yield "else"
    yield f"    echo '{ids}: not submitted, as what that waits for ended otherwise' >&2"
    yield "fi"


def _condition(job: ExportedJob, ids: Collection[int]) -> str:
    kinds: dict[DependencyKind, list[int]] = {}
    for each in job.after:
        if each.job_id in ids:
            kinds.setdefault(each.kind, []).append(each.job_id)
    return " && ".join(f"ended {kind} {' '.join(map(str, others))}" for kind, others in kinds.items())


def _asked(job: ExportedJob, settings: RaySettings) -> Iterator[str]:
    options = job.terms.options if job.engine == _NAME else ()
    parcel = ClusterSubmission(token="", terms=replace(job.terms, options=options), count=1, folder="", supervisor=())
    for field, value in submission_of(parcel, 0, settings.card_mb).items():
        if field.startswith("entrypoint_"):
            told = json.dumps(value) if isinstance(value, dict) else value
            yield f"--{field.replace('_', '-')}={told}"
