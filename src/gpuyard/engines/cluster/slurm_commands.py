"""What is said to Slurm and what it says: the words of its commands, and what they print. Pure: nobody is asked here.

What Slurm does, and its manual does not say loudly (22.05):
- A job that exports nothing, or a list of names, gets a login shell run for it on its node, which takes seconds. So all
  is exported, out of an environment with next to nothing in it.
- Columns of `squeue --Format` are cut to their width: they are read by their place, whatever is in them.
- An element that is cancelled while it waits is gone from `squeue` at once. Where it was the last one that waited, the
  array stays behind as a record without a number.
- A submission that is refused may leave a record behind, which has failed.
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
from gpuyard.engines.cluster.slurm_text import at_of, reason_of, status_of

_OURS = "gpuyard:"
# What its commands need to find their configuration, and what a user may have said for every job of theirs.
_PASSED_ON = frozenset(
    (
        *("HOME", "KRB5CCNAME", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TMPDIR", "USER"),
        *("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION"),
        *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"),
    )
)
_LONGEST_NAME = 200
# Of the list: what is read from which column, and how wide that is to be.
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
# And of the accounts.
_FIELDS = {"job": "JobID", "state": "State", "code": "ExitCode", "start": "Start", "end": "End", "place": "NodeList"}
_MOST_IN_ARRAY = re.compile(r"^MaxArraySize\s*= ([0-9]+)$|\bmax_array_tasks=([0-9]+)", re.MULTILINE)
_LISTED_FOR = re.compile(r"^MinJobAge\s*= ([0-9]+) sec$", re.MULTILINE)
_NOWHERE = "None assigned"
_ELEMENT = re.compile(r"([0-9]+)(?:_([0-9]+))?")
_TAKEN = re.compile(r"^([0-9]+)(?:;.*)?$", re.MULTILINE)
_CANCELLED_AT_ONCE = 500


class SlurmSettings(Struct, frozen=True, kw_only=True):
    """`options` are more words for every `sbatch`. Where a shard stands for `shard_mb`, jobs that share a GPU ask for
    shards. `nice_base` is what a job of priority 0 gets; nobody but root may be less nice than 0."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    options: tuple[str, ...] = ()
    shard_mb: float | None = None
    card_mb: float | None = None
    nice_base: int = 0
    most_jobs: int = 5000


class SlurmJobRow(Struct, frozen=True, kw_only=True):
    """An element as Slurm lists it; what is no array has no `number`, and neither has what is left of one."""

    job: str
    number: int | None
    token: str | None
    sighting: Sighting


class SlurmLimits(Struct, frozen=True, kw_only=True):
    """So many elements make an array at most, and so long what is over is still listed at least."""

    most_in_array: int = 1000
    listed_for_s: float = 0.0


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """For Slurm's commands, and for jobs until their own takes its place. Settings of the job in which a daemon may be
    running itself are no settings for others."""
    return {**{name: value for name, value in own.items() if name in _PASSED_ON}, "LC_ALL": "C"}


# Handing over


def submission(parcel: ClusterSubmission, settings: SlurmSettings) -> list[str]:
    terms = parcel.terms
    named = {"partition": settings.partition, "account": settings.account, "qos": settings.qos}
    return [
        *("sbatch", "--parsable", "--no-requeue", "--export=ALL", "--nodes=1", "--ntasks=1"),
        f"--job-name={_name_of(terms)}",
        f"--chdir={parcel.folder}",
        f"--output={parcel.folder.replace('%', '%%')}/{'%a' if parcel.count > 1 else '0'}.out",
        *_array_of(parcel),
        *_resources_of(terms, settings),
        *(f"--{option}={value}" for option, value in named.items() if value is not None),
        *settings.options,
        *terms.options,
        f"--comment={_OURS}{parcel.token}",  # the last one counts: by it we know the job
    ]


def _name_of(terms: ClusterTerms) -> str:
    printable = "".join(letter if letter.isprintable() else " " for letter in terms.name)
    return printable[:_LONGEST_NAME].strip() or "gpuyard"


def _array_of(parcel: ClusterSubmission) -> Iterator[str]:
    if parcel.count > 1:
        at_most = parcel.terms.at_most
        yield f"--array=0-{parcel.count - 1}" + (f"%{at_most}" if at_most else "")


def _resources_of(terms: ClusterTerms, settings: SlurmSettings) -> Iterator[str]:
    if terms.need.devices:
        yield f"--gres={_gres_of(terms.need, settings)}"
    if terms.ram_mb:  # all of a node's is what 0 would ask for
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
    """`None` for whole GPUs: also where nobody knows how much it will use, as nobody here measures it."""
    if settings.shard_mb is None or need.devices != 1 or not isinstance(need.memory, FixedMemory | PartOfDevice):
        return None
    memory_mb, card_mb = need.required_mb, settings.card_mb
    if isinstance(need.memory, PartOfDevice) and card_mb is not None:
        memory_mb = need.memory.part * card_mb
    if memory_mb is None or (card_mb is not None and memory_mb >= card_mb):
        return None
    return max(1, math.ceil(memory_mb / settings.shard_mb))


def script(parcel: ClusterSubmission) -> str:
    return f'#!/bin/sh\nexec {shlex.join(parcel.supervisor)} "${{SLURM_ARRAY_TASK_ID:-0}}"\n'


def parse_submission(text: str) -> str | None:
    """The job's number; a site may have `sbatch` print more than that."""
    found = _TAKEN.findall(text)
    return found[-1] if found else None


# Looking


class _Cells(Struct, frozen=True, kw_only=True):
    """A line of the list or of the accounts, as it is written there."""

    job: str
    state: str
    code: str
    start: str
    end: str
    place: str
    number: str = ""
    reason: str = ""
    comment: str = ""


def listing(uid: int) -> list[str]:
    columns = ",".join(f"{name}:{width}" for name, width in _COLUMNS.values())
    return ["squeue", "--noheader", "--array", "--states=all", f"--user={uid}", f"--Format={columns}"]


def parse_listing(text: bytes) -> list[SlurmJobRow]:
    """Whatever cannot be read is no job of ours: others may have line breaks in their comments."""
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


def accounting(jobs: Iterable[str]) -> list[str]:
    """All elements of these, however long ago they ended."""
    words = ["sacct", "--noheader", "--parsable2", "--allocations", f"--format={','.join(_FIELDS.values())}"]
    return [*words, f"--jobs={','.join(sorted(jobs))}"]


def parse_accounting(text: str) -> list[SlurmJobRow]:
    """Only what is over: the accounts may be late, and what lives is listed."""
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
    at = at_of(state, place)
    is_over = at in OVER
    return Sighting(
        id=id_,
        at=at,
        reason=reason_of(state, cells.reason),
        place=place,
        # Of what waits it is when it is expected to start, and of what runs when it will have to end.
        started_at=_time(cells.start) if place and at is not SiteState.PENDING else None,
        ended_at=_end_of_second(_time(cells.end)) if is_over else None,
        status=status_of(cells.code) if place and is_over else None,
    )


def _time(text: str) -> float | None:
    """Slurm has whole seconds, and cuts off the rest."""
    return float(text) if text.isdigit() else None


def _end_of_second(at: float | None) -> float | None:
    """The latest that it can have ended: otherwise it would seem to have run for a second less than it did."""
    return None if at is None else at + 1


# Taking back


def cancelling(ids: Sequence[str]) -> Iterator[list[str]]:
    """A call for some hundreds at a time. It sends SIGCONT and SIGTERM to every process of a job, and SIGKILL after the
    site's KillWait; `--batch` would kill the supervisor alone, and leave its program running."""
    for first in range(0, len(ids), _CANCELLED_AT_ONCE):
        yield ["scancel", "--quiet", *_joined(ids[first : first + _CANCELLED_AT_ONCE])]


def _joined(ids: Iterable[str]) -> Iterator[str]:
    """Elements of an array in one word, as `17_[0-3,7]`."""
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
    """Consecutive numbers are those that are equally far from their places."""
    for _, run in groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        first, *rest = [number for _, number in run]
        yield f"{first}-{rest[-1]}" if rest else f"{first}"


# What a site allows


def configuration() -> list[str]:
    return ["scontrol", "show", "config"]


def parse_configuration(text: str) -> SlurmLimits:
    most = [int(size or tasks) for size, tasks in _MOST_IN_ARRAY.findall(text)]
    listed_for = _LISTED_FOR.search(text)
    return SlurmLimits(
        # Where there are no arrays at all the largest size is 0.
        most_in_array=max(1, min(most)) if most else SlurmLimits().most_in_array,
        listed_for_s=float(listed_for[1]) if listed_for else 0.0,
    )
