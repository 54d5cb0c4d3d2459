"""Slurm's commands: builds their arguments, and parses their output and errors. Pure: runs nothing.

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

from gpuyard.config import SlurmConfig
from gpuyard.engines.cluster.site import (
    OVER,
    ClusterNode,
    ClusterSubmission,
    Sighting,
    SiteRefused,
    SiteState,
    SiteUnreachable,
)
from gpuyard.engines.common.spawn_program import BY_SIGNAL
from gpuyard.model.cluster_terms import Amount, Basis, ClusterTerms, whole_gpu_basis
from gpuyard.model.job import SiteRequest
from gpuyard.model.lease import FixedMemory, Need, PartOfDevice
from gpuyard.model.printable_text import LONGEST_MESSAGE, printable
from gpuyard.model.stopping import signal_name

_OURS = "gpuyard:"
# What the commands need to find their configuration, and defaults that a user may have set for all jobs.
_KEPT_VARIABLES = frozenset(
    (
        *("HOME", "KRB5CCNAME", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TMPDIR", "USER"),
        *("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION"),
        *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"),
    )
)
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
_ELEMENT = re.compile(r"([0-9]+)(?:_([0-9]+))?")
_TAKEN = re.compile(r"^([0-9]+)(?:;.*)?$", re.MULTILINE)
_WAITING = frozenset(
    ("CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
)
# `scontrol suspend`, gang scheduling, and SIGSTOP by Slurm.
_SUSPENDED = frozenset(("SUSPENDED", "STOPPED"))
_ENDS = {
    "COMPLETED": SiteState.SUCCEEDED,
    "FAILED": SiteState.FAILED,
    "TIMEOUT": SiteState.TIMED_OUT,
    "DEADLINE": SiteState.TIMED_OUT,
    "OUT_OF_MEMORY": SiteState.OUT_OF_MEMORY,
    "CANCELLED": SiteState.CANCELLED,
    "PREEMPTED": SiteState.PREEMPTED,
    "NODE_FAIL": SiteState.LOST,
    "BOOT_FAIL": SiteState.LOST,
    "LAUNCH_FAILED": SiteState.LOST,
    "RECONFIG_FAIL": SiteState.LOST,
    "REVOKED": SiteState.LOST,
}
# By the start of a reason; the first match counts.
_REASONS = {
    "Resources": "what it asks for is in use",
    "Priority": "others are ahead of it",
    "Dependency": "it waits for another job",
    "BeginTime": "its start time has not come",
    "JobArrayTaskLimit": "its group has reached its limit of running jobs",
    "JobHeldUser": "it is held: `scontrol release` lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "NodeDown": "its node went down",
    "PartitionDown": "its partition starts nothing now",
    "PartitionInactive": "its partition starts nothing now",
    "PartitionTimeLimit": "its time limit is above what its partition allows",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows",
    "PartitionConfig": "its partition cannot give what it asks for",
    "BadConstraints": "no node can ever give what it asks for",
    "Licenses": "it waits for a licence",
    "Reservation": "it waits for its reservation",
    "QOS": "a limit of its QOS is reached",
    "Assoc": "a limit of its account or user is reached",
    "MaxQOS": "a limit of its QOS is reached",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "JobLaunchFailure": "it could not be launched, or its supervisor was killed",
    "Prolog": "the site's prolog is running, or has failed",
}
# The job's state or exit status says the same.
_REDUNDANT_REASONS = frozenset(("", "None", "(null)", "NonZeroExitCode", "TimeLimit", "OutOfMemory"))
_UNREACHED = re.compile(
    r"unable to contact|connection (?:refused|timed out|reset)|timed out|munge|authentication|zero bytes|no route to"
    r"|configuration source|standby|retrying|temporarily|communication",
    re.IGNORECASE,
)
_NO_LONGER_THERE = re.compile(r"invalid job id|already complet", re.IGNORECASE)
_NEVER = re.compile(r"invalid (?!user)|unrecognized option", re.IGNORECASE)
_NOT_AVAILABLE = re.compile(r"node configuration is not available|specification can not be satisfied", re.IGNORECASE)
_PARTITION = re.compile(r"^(?:--partition=|-p ?)(.+)$", re.MULTILINE)
_PREFIX = re.compile(r"^(?:\w+: )?(?:error: |fatal: )?(?:Batch job submission failed: |allocation failure: )?")


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
    """Return the environment for Slurm's commands. Settings of a Slurm job that the daemon runs in must not apply."""
    return {**{name: value for name, value in own.items() if name in _KEPT_VARIABLES}, "LC_ALL": "C"}


def submit_command(submission: ClusterSubmission, settings: SlurmConfig) -> list[str]:
    terms = submission.terms
    name = "".join(letter if letter.isprintable() else " " for letter in terms.name)[:200].strip()
    array = f"--array=0-{submission.count - 1}" + (f"%{terms.at_most}" if terms.at_most else "")
    return [
        *("sbatch", "--parsable", "--no-requeue", "--export=ALL", "--nodes=1"),
        f"--job-name={name or 'gpuyard'}",
        f"--chdir={submission.folder}",
        f"--output={submission.folder.replace('%', '%%')}/{'%a' if submission.count > 1 else '0'}.out",
        *([array] if submission.count > 1 else ()),
        *([f"--exclude={','.join(submission.without)}"] if submission.without else ()),
        *_resources_of(terms, settings),
        *_named(settings),
        *settings.options,
        *terms.options,
        f"--comment={_OURS}{submission.token}",  # last, so that it wins: it identifies the job
    ]


def request_of(submission: ClusterSubmission, settings: SlurmConfig) -> SiteRequest:
    command, terms = submit_command(submission, settings), submission.terms
    is_whole = _shards_of(terms.need, settings) is None
    origins = {
        "--gres": whole_gpu_basis(terms) if is_whole else terms.memory_basis,
        "--mem": terms.ram_basis,
        "--cpus-per-task": Basis.DECLARED,
        "--time": terms.time_basis,
        **dict.fromkeys(("--partition", "--account", "--qos", "--nice"), "configured"),
    }
    given = {argument.partition("=")[0] for argument in command if argument not in terms.options}
    sent = {name: each for name, each in origins.items() if name in given}
    return SiteRequest(text=shlex.join(command), origins=sent)


def test_command(terms: ClusterTerms, settings: SlurmConfig) -> list[str]:
    tested = ClusterSubmission(token="", terms=terms, count=1, folder="/", supervisor=())
    program, *arguments = submit_command(tested, settings)
    return [program, "--test-only", *arguments]


def _named(settings: SlurmConfig) -> list[str]:
    named = {"partition": settings.partition, "account": settings.account, "qos": settings.qos}
    return [f"--{option}={value}" for option, value in named.items() if value is not None]


def _resources_of(terms: ClusterTerms, settings: SlurmConfig) -> Iterator[str]:
    if terms.need.devices:
        kind = "" if terms.need.model is None else f":{terms.need.model}"
        shards = _shards_of(terms.need, settings)
        yield f"--gres=gpu{kind}:{terms.need.devices}" if shards is None else f"--gres=shard{kind}:{shards}"
    if terms.ram_mb:  # 0 would request all memory of a node
        yield f"--mem={math.ceil(terms.ram_mb)}M"
    if terms.cpus:
        yield f"--cpus-per-task={terms.cpus}"
    limit_s = terms.expected_s if terms.limit_s is None else terms.limit_s
    minutes = None if limit_s is None else max(1, math.ceil(limit_s / 60))
    if minutes is not None:
        yield f"--time={minutes}"
    if terms.warning is not None:
        # To the supervisor alone, which passes it on. Slurm counts from its own limit, which is in whole minutes.
        rounded_s = 0.0 if minutes is None or terms.limit_s is None else minutes * 60 - terms.limit_s
        yield f"--signal=B:{signal_name(terms.warning.signum)}@{math.ceil(terms.warning.lead_s + rounded_s)}"
    if nice := max(0, settings.nice_base - terms.priority):
        yield f"--nice={nice}"


def _shards_of(need: Need, settings: SlurmConfig) -> int | None:
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


def nodes_command(terms: ClusterTerms, settings: SlurmConfig) -> list[str]:
    named = _PARTITION.findall("\n".join(terms.options)) or [settings.partition]
    partition = [] if named[-1] is None else [f"--partition={named[-1]}"]
    return ["sinfo", "--noheader", "--Node", "--Format=CPUs:16,Memory:16,Gres:1024", *partition]


def parse_nodes(text: str, model: str | None) -> tuple[Amount, ...]:
    found = set[Amount]()
    for line in text.splitlines():
        cpus, memory, gres = line[:16].strip(), line[16:32].strip(), line[32:].strip()
        if cpus.isdigit() and memory.isdigit():
            found.add(Amount(gpus=_count_gpus(gres, model), cpus=float(cpus), ram_mb=float(memory)))
    return tuple(found)


def states_command(settings: SlurmConfig) -> list[str]:
    partition = [] if settings.partition is None else [f"--partition={settings.partition}"]
    return ["sinfo", "--noheader", "--Node", "--Format=NodeList:128,StateLong:64,Gres:1024", *partition]


def parse_states(text: str) -> list[ClusterNode]:
    """Return each node once, though it may be in several partitions."""
    nodes = {}
    for line in text.splitlines():
        name, state, gres = line[:128].strip(), line[128:192].strip(), line[192:].strip()
        is_up = state.rstrip("+#~!%$@^-") in ("idle", "mixed", "allocated", "completing", "planned")
        trouble = "" if is_up else f"Slurm says that it is {state}: `scontrol show node {name}` says why"
        if name:
            nodes[name] = ClusterNode(name=name, place=name, trouble=trouble, has_gpus=_count_gpus(gres, None) > 0)
    return list(nodes.values())


def run_command(node: ClusterNode, script: str, settings: SlurmConfig, within_s: float) -> list[str]:
    """Return the command that runs a script on this node, prints its output, and gives up if the node is busy."""
    return [
        *("srun", "--quiet", f"--nodelist={node.name}", "--nodes=1", "--ntasks=1", "--time=1", "--mpi=none"),
        *("--export=ALL", "--chdir=/", "--job-name=gpuyard-doctor", f"--immediate={math.ceil(within_s)}"),
        *(["--gres=gpu:1"] if node.has_gpus else []),
        *_named(settings),
        *("sh", "-c", script),
    ]


def _count_gpus(gres: str, model: str | None) -> float:
    """Count the GPUs in a node's generic resources, such as `gpu:a100:2(S:0-1),shard:48`."""
    count = 0
    for each in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *words = each.split(":")
        number = int(words.pop()) if words and words[-1].isdigit() else 1
        count += number if name == "gpu" and (model is None or model in words) else 0
    return float(count)


def list_command(uid: int) -> list[str]:
    columns = ",".join(f"{name}:{width}" for name, width in _COLUMNS.values())
    return ["squeue", "--noheader", "--array", "--states=all", f"--user={uid}", f"--Format={columns}"]


def parse_listing(text: bytes) -> list[SlurmJobRow]:
    ends = list(accumulate((width for _, width in _COLUMNS.values()), initial=0))
    rows = []
    for line in text.decode("ascii", "replace").split("\n"):
        values = [line[begin:end].strip() for begin, end in pairwise(ends)]
        cells = dict(zip(_COLUMNS, values, strict=True))
        has_number = cells["number"].isdigit()
        rows.append(_row(f"{cells['job']}_{cells['number']}" if has_number else cells["job"], cells))
    return [row for row in rows if row is not None]


def accounting_command(jobs: Iterable[str]) -> list[str]:
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--format={','.join(_FIELDS.values())}"]
    return [*command, f"--jobs={','.join(sorted(jobs))}"]


def parse_accounting(text: str) -> list[SlurmJobRow]:
    """Return only elements that are over: accounting may be late, and `squeue` lists live ones."""
    lines = (line.split("|") for line in text.splitlines())
    cells = (dict(zip(_FIELDS, line, strict=True)) for line in lines if len(line) == len(_FIELDS))
    rows = (_row(each["job"], each) for each in cells)
    return [row for row in rows if row is not None and row.sighting.at in OVER]


def _row(id_: str, cells: Mapping[str, str]) -> SlurmJobRow | None:
    element = _ELEMENT.fullmatch(id_)
    if element is None or not cells["state"]:
        return None
    state = cells["state"].partition(" ")[0]  # of `CANCELLED by 1000`
    place = cells["place"] if cells["place"] != "None assigned" else ""
    at, start, end = state_of(state, place), cells["start"], cells["end"]
    is_over = at in OVER
    sighting = Sighting(
        id=id_,
        at=at,
        reason=reason_of(cells.get("reason", "")),
        place=place,
        # For a waiting job Slurm has the expected start, and for a running one the latest end.
        started_at=float(start) if place and at is not SiteState.PENDING and start.isdigit() else None,
        # The latest possible end, as Slurm cuts off fractions: otherwise jobs would seem up to a second shorter.
        ended_at=float(end) + 1.0 if is_over and end.isdigit() else None,
        status=status_of(cells["code"]) if place and is_over else None,
    )
    comment = cells.get("comment", "")
    return SlurmJobRow(
        job=element[1],
        number=None if element[2] is None else int(element[2]),
        token=comment.removeprefix(_OURS) if comment.startswith(_OURS) else None,
        sighting=sighting,
    )


def state_of(state: str, place: str) -> SiteState:
    """Translate a state. An unknown one does not count as an end: jobs that are over leave Slurm's list."""
    if state in _ENDS:
        return _ENDS[state]
    if state in _WAITING or not place:
        return SiteState.PENDING
    return SiteState.SUSPENDED if state in _SUSPENDED else SiteState.RUNNING


def reason_of(reason: str) -> str:
    """Return Slurm's own word, which manuals and administrators use, followed by an explanation."""
    if reason in _REDUNDANT_REASONS:
        return ""
    explanation = next((text for start, text in _REASONS.items() if reason.startswith(start)), None)
    return reason if explanation is None else f"{reason}: {explanation}"


def status_of(code: str) -> int | None:
    """Parse `EXIT:SIGNAL` or a wait status. `squeue` has an error number of its own for a job that was not launched."""
    status, colon, signum = code.partition(":")
    if not status.isdigit() or (colon and not signum.isdigit()):
        return None
    exited, killed = (int(status), int(signum)) if colon else (int(status) >> 8, int(status) & 0x7F)
    if exited and killed:
        return None
    return BY_SIGNAL + killed if killed else exited


def cancel_commands(ids: Sequence[str]) -> Iterator[list[str]]:
    """Yield a command for 500 elements at a time. It sends SIGCONT and SIGTERM to every process of a job, and SIGKILL
    after the site's KillWait; `--batch` would kill the supervisor alone, and leave its program running."""
    for first in range(0, len(ids), 500):
        yield ["scancel", "--quiet", *_joined(ids[first : first + 500])]


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
        # Consecutive numbers have the same distance from their position.
        runs = groupby(enumerate(sorted(set(numbers))), lambda each: each[1] - each[0])
        ends = ([number for _, number in run] for _, run in runs)
        yield f"{job}_[{','.join(f'{run[0]}-{run[-1]}' if len(run) > 1 else f'{run[0]}' for run in ends)}]"


def configuration_command() -> list[str]:
    return ["scontrol", "show", "config"]


def parse_configuration(text: str) -> SlurmLimits:
    most = [int(size or tasks) for size, tasks in _MOST_IN_ARRAY.findall(text)]
    listed_for = _LISTED_FOR.search(text)
    # The largest size is 0 at a site without arrays.
    most_in_array = max(1, min(most)) if most else SlurmLimits().most_in_array
    return SlurmLimits(most_in_array=most_in_array, listed_for_s=float(listed_for[1]) if listed_for else 0.0)


def fault_of(program: str, status: int, errors: str) -> SiteUnreachable | SiteRefused | None:
    """Return why a command failed; None if it only found nothing left to do."""
    message = _in_one_line(errors) or f"{program} exited with status {status}"
    if program == "scancel" and status > 0 and all(map(_NO_LONGER_THERE.search, errors.splitlines())):
        return None
    if program != "sbatch" or status < 0 or _UNREACHED.search(errors):
        return SiteUnreachable(message, hint=f"run `{program}` by hand, or `scontrol ping`")
    is_limit = re.search(r"policy|limit", errors, re.IGNORECASE)
    return SiteRefused(message, hint="lower `most_jobs` in [slurm], if there are too many jobs" if is_limit else None)


def is_about_nodes(error: SiteRefused) -> bool:
    """Return whether Slurm says that no node can take the job. It also says so while all that could are down."""
    return _NOT_AVAILABLE.search(str(error)) is not None


def is_for_ever(error: SiteRefused) -> bool:
    return _NEVER.search(str(error)) is not None


def unanswered(program: str, limit_s: float, errors: str) -> SiteUnreachable:
    message = f": {_in_one_line(errors)}".removesuffix(": ")
    return SiteUnreachable(f"{program} did not answer within {limit_s:.0f} s{message}")


def _in_one_line(errors: str) -> str:
    lines = (_PREFIX.sub("", line).strip() for line in errors.splitlines())
    return printable("; ".join(dict.fromkeys(line for line in lines if line)), LONGEST_MESSAGE)
