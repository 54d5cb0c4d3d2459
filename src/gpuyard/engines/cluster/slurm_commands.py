"""Slurm's commands: builds their arguments, and parses their output. Pure: runs nothing.

How Slurm behaves beyond its manual (22.05):
- For a job that exports nothing, or a list of names, Slurm runs a login shell on the node, which takes seconds. So we
  export everything, out of an almost empty environment.
- `squeue --Format` cuts columns to their width, so they are read by position.
- An element that is cancelled while it waits vanishes from `squeue` at once. If it was the last waiting one, the array
  remains as a record without an element number.
- A refused submission may leave a record in state FAILED.
"""

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise

from msgspec import Struct

from gpuyard.core.cluster.offer import ClusterTerms
from gpuyard.core.lease import FixedMemory, Need, PartOfDevice
from gpuyard.engines.cluster.site import OVER, ClusterSubmission, Sighting, SiteState
from gpuyard.engines.cluster.slurm_text import reason_of, state_of, status_of

_OURS = "gpuyard:"
# What the commands need to find their configuration, and defaults that a user may have set for all jobs.
_KEPT_VARIABLES = frozenset(
    (
        *("HOME", "KRB5CCNAME", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TMPDIR", "USER"),
        *("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION"),
        *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"),
    )
)
_LONGEST_NAME = 200
# Fields of `squeue`: the column, and its width.
_COLUMNS = {
    "job": ("ArrayJobID", 16),
    "number": ("ArrayTaskID", 16),
    "state": ("State", 24),
    "code": ("exit_code", 16),
    "start": ("StartTime", 24),
    "end": ("EndTime", 24),
    "place": ("NodeList", 128),
    "reason": ("Reason", 160),
    "comment": ("Comment", 128),
}
# Fields of `sacct`.
_FIELDS = {"job": "JobID", "state": "State", "code": "ExitCode", "start": "Start", "end": "End", "place": "NodeList"}
_MOST_IN_ARRAY = re.compile(r"^MaxArraySize\s*= ([0-9]+)$|\bmax_array_tasks=([0-9]+)", re.MULTILINE)
_LISTED_FOR = re.compile(r"^MinJobAge\s*= ([0-9]+) sec$", re.MULTILINE)
_NOWHERE = "None assigned"
_ELEMENT = re.compile(r"([0-9]+)(?:_([0-9]+))?")
_TAKEN = re.compile(r"^([0-9]+)(?:;.*)?$", re.MULTILINE)
_CANCELLED_AT_ONCE = 500


class SlurmSettings(Struct, frozen=True, kw_only=True):
    """
    options: more arguments for every `sbatch`.
    shard_mb: the memory that a shard stands for; if given, jobs that share a GPU request shards.
    nice_base: the nice value of a job with priority 0; only root may use values below 0.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    options: tuple[str, ...] = ()
    shard_mb: float | None = None
    card_mb: float | None = None
    nice_base: int = 0
    most_jobs: int = 5000


class SlurmJobRow(Struct, frozen=True, kw_only=True):
    """An element as Slurm lists it. `number` is None for a job that is no array, and for the remains of an array."""

    job: str
    number: int | None
    token: str | None
    sighting: Sighting


class SlurmLimits(Struct, frozen=True, kw_only=True):
    """The largest array, and for how long at least Slurm lists jobs that are over."""

    most_in_array: int = 1000
    listed_for_s: float = 0.0


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Slurm's commands, and for jobs until the supervisor sets theirs. If the daemon runs in
    a Slurm job itself, the settings of that job must not apply to others."""
    return {**{name: value for name, value in own.items() if name in _KEPT_VARIABLES}, "LC_ALL": "C"}


# Submitting


def submit_command(submission: ClusterSubmission, settings: SlurmSettings) -> list[str]:
    terms = submission.terms
    named = {"partition": settings.partition, "account": settings.account, "qos": settings.qos}
    return [
        *("sbatch", "--parsable", "--no-requeue", "--export=ALL", "--nodes=1", "--ntasks=1"),
        f"--job-name={_name_of(terms)}",
        f"--chdir={submission.folder}",
        f"--output={submission.folder.replace('%', '%%')}/{'%a' if submission.count > 1 else '0'}.out",
        *_array_of(submission),
        *_resources_of(terms, settings),
        *(f"--{option}={value}" for option, value in named.items() if value is not None),
        *settings.options,
        *terms.options,
        f"--comment={_OURS}{submission.token}",  # last, so that it wins: it identifies the job
    ]


def _name_of(terms: ClusterTerms) -> str:
    printable = "".join(letter if letter.isprintable() else " " for letter in terms.name)
    return printable[:_LONGEST_NAME].strip() or "gpuyard"


def _array_of(submission: ClusterSubmission) -> Iterator[str]:
    if submission.count > 1:
        at_most = submission.terms.at_most
        yield f"--array=0-{submission.count - 1}" + (f"%{at_most}" if at_most else "")


def _resources_of(terms: ClusterTerms, settings: SlurmSettings) -> Iterator[str]:
    if terms.need.devices:
        yield f"--gres={_gres_of(terms.need, settings)}"
    if terms.ram_mb:  # 0 would request all memory of a node
        yield f"--mem={math.ceil(terms.ram_mb)}M"
    if terms.cpus:
        yield f"--cpus-per-task={terms.cpus}"
    limit_s = terms.expected_s if terms.limit_s is None else terms.limit_s
    if limit_s is not None:
        yield f"--time={max(1, math.ceil(limit_s / 60))}"
    if nice := max(0, settings.nice_base - terms.priority):
        yield f"--nice={nice}"


def _gres_of(need: Need, settings: SlurmSettings) -> str:
    kind = "" if need.model is None else f":{need.model}"
    shards = _shards_of(need, settings)
    return f"gpu{kind}:{need.devices}" if shards is None else f"shard{kind}:{shards}"


def _shards_of(need: Need, settings: SlurmSettings) -> int | None:
    """Return None for whole GPUs; also if the job's memory is unknown, because it is not measured on the node."""
    if settings.shard_mb is None or need.devices != 1 or not isinstance(need.memory, FixedMemory | PartOfDevice):
        return None
    memory_mb, card_mb = need.required_mb, settings.card_mb
    if isinstance(need.memory, PartOfDevice) and card_mb is not None:
        memory_mb = need.memory.part * card_mb
    if memory_mb is None or (card_mb is not None and memory_mb >= card_mb):
        return None
    return max(1, math.ceil(memory_mb / settings.shard_mb))


def script(submission: ClusterSubmission) -> str:
    return f'#!/bin/sh\nexec {shlex.join(submission.supervisor)} "${{SLURM_ARRAY_TASK_ID:-0}}"\n'


def parse_submission(text: str) -> str | None:
    """Return the job's number. At some sites `sbatch` prints more than that."""
    found = _TAKEN.findall(text)
    return found[-1] if found else None


# Listing


class _Cells(Struct, frozen=True, kw_only=True):
    """A line of `squeue` or `sacct`, as text."""

    job: str
    state: str
    code: str
    start: str
    end: str
    place: str
    number: str = ""
    reason: str = ""
    comment: str = ""


def list_command(uid: int) -> list[str]:
    columns = ",".join(f"{name}:{width}" for name, width in _COLUMNS.values())
    return ["squeue", "--noheader", "--array", "--states=all", f"--user={uid}", f"--Format={columns}"]


def parse_listing(text: bytes) -> list[SlurmJobRow]:
    """Ignores lines that cannot be parsed: other jobs may have line breaks in their comments."""
    ends = list(accumulate((width for _, width in _COLUMNS.values()), initial=0))
    lines = (line.decode("ascii", "replace") for line in text.split(b"\n"))
    cells = ([line[begin:end].strip() for begin, end in pairwise(ends)] for line in lines)
    return [row for each in cells if (row := _listed(_Cells(**dict(zip(_COLUMNS, each, strict=True))))) is not None]


def _listed(cells: _Cells) -> SlurmJobRow | None:
    if not cells.job.isdigit() or not cells.state:
        return None
    number = int(cells.number) if cells.number.isdigit() else None
    return SlurmJobRow(
        job=cells.job,
        number=number,
        token=cells.comment.removeprefix(_OURS) if cells.comment.startswith(_OURS) else None,
        sighting=_sighting(cells.job if number is None else f"{cells.job}_{number}", cells),
    )


def accounting_command(jobs: Iterable[str]) -> list[str]:
    """List all elements of these jobs, however long ago they ended."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--format={','.join(_FIELDS.values())}"]
    return [*command, f"--jobs={','.join(sorted(jobs))}"]


def parse_accounting(text: str) -> list[SlurmJobRow]:
    """Return only elements that are over: accounting may be late, and `squeue` lists live ones."""
    lines = (line.split("|") for line in text.splitlines())
    cells = (_Cells(**dict(zip(_FIELDS, line, strict=True))) for line in lines if len(line) == len(_FIELDS))
    rows = [row for each in cells if (row := _accounted(each)) is not None]
    return [row for row in rows if row.sighting.at in OVER]


def _accounted(cells: _Cells) -> SlurmJobRow | None:
    element = _ELEMENT.fullmatch(cells.job)
    if element is None:
        return None
    number = None if element[2] is None else int(element[2])
    return SlurmJobRow(job=element[1], number=number, token=None, sighting=_sighting(cells.job, cells))


def _sighting(id_: str, cells: _Cells) -> Sighting:
    state = cells.state.partition(" ")[0]  # of `CANCELLED by 1000`
    place = cells.place if cells.place != _NOWHERE else ""
    at = state_of(state, place)
    is_over = at in OVER
    return Sighting(
        id=id_,
        at=at,
        reason=reason_of(state, cells.reason),
        place=place,
        # For a waiting job Slurm has the expected start, and for a running one the latest end.
        started_at=_time(cells.start) if place and at is not SiteState.PENDING else None,
        ended_at=_end_of_second(_time(cells.end)) if is_over else None,
        status=status_of(cells.code) if place and is_over else None,
    )


def _time(text: str) -> float | None:
    """Parse whole seconds: Slurm cuts off fractions."""
    return float(text) if text.isdigit() else None


def _end_of_second(at: float | None) -> float | None:
    """Return the latest possible end: otherwise a job would seem to have run up to a second shorter."""
    return None if at is None else at + 1


# Cancelling


def cancel_commands(ids: Sequence[str]) -> Iterator[list[str]]:
    """Yield a command for 500 elements at a time. It sends SIGCONT and SIGTERM to every process of a job, and SIGKILL
    after the site's KillWait; `--batch` would kill the supervisor alone, and leave its program running."""
    for first in range(0, len(ids), _CANCELLED_AT_ONCE):
        yield ["scancel", "--quiet", *_joined(ids[first : first + _CANCELLED_AT_ONCE])]


def _joined(ids: Iterable[str]) -> Iterator[str]:
    """Join elements of an array in one argument, as `17_[0-3,7]`."""
    arrays: dict[str, list[int]] = {}
    for each in ids:
        element = _ELEMENT.fullmatch(each)
        if element is None or element[2] is None:
            yield each
        else:
            arrays.setdefault(element[1], []).append(int(element[2]))
    for job, numbers in arrays.items():
        yield f"{job}_[{','.join(_ranges(sorted(set(numbers))))}]"


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Group consecutive numbers: those with the same distance from their position."""
    for _, run in groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        first, *rest = [number for _, number in run]
        yield f"{first}-{rest[-1]}" if rest else f"{first}"


# Limits


def configuration_command() -> list[str]:
    return ["scontrol", "show", "config"]


def parse_configuration(text: str) -> SlurmLimits:
    most = [int(size or tasks) for size, tasks in _MOST_IN_ARRAY.findall(text)]
    listed_for = _LISTED_FOR.search(text)
    return SlurmLimits(
        # The largest size is 0 at a site without arrays.
        most_in_array=max(1, min(most)) if most else SlurmLimits().most_in_array,
        listed_for_s=float(listed_for[1]) if listed_for else 0.0,
    )
