"""What is said to Ray and what it says, as its Jobs REST API has it. Pure: nobody is asked here.

What Ray does, and its manual does not say (2.60):
- A job's `start_time` is when it was submitted, so nothing says when it began to run.
- It has an exit code where its command ended by itself, and none where Ray lost it: its supervising actor died, or its
  node, or it was never started, which Ray gives up after 15 minutes.
- A request that breaks off while a job is submitted may leave it pending for ever.
- What is in use is told every 5 seconds.
"""

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from gpuyard.core.cluster.offer import Amount, ClusterTerms, amount_needed
from gpuyard.core.job.job import DEFAULT_GRACE_S
from gpuyard.engines.cluster.site import ClusterSubmission, Mark, Sighting, SiteRefused, SiteState, SiteUnreachable
from gpuyard.errors import EnvironmentFault

T = TypeVar("T")

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_OURS = "gpuyard-"
_MB = 1048576
# Ray's own `accelerator_type` asks for so much of the resource that stands for a model.
_A_LITTLE = 0.001
# Words of `ray job submit` that mean something here, and the field that each fills.
_OPTIONS = {
    "--entrypoint-resources": "entrypoint_resources",
    "--entrypoint-label-selector": "entrypoint_label_selector",
}
_PLAIN = {"SUCCEEDED": SiteState.SUCCEEDED, "STOPPED": SiteState.CANCELLED}
_KILLED_UNDER_SETSID = "did not exit normally"
_NEVER_STARTED_S = 20 * 60
_STALE_S = 60.0
# So long after a job's end its resources may still count as used.
_LINGER_S = 1.0


class RaySettings(Struct, frozen=True, kw_only=True):
    """`address` is the dashboard's. Each GPU has `card_mb`, where somebody has said so."""

    address: str | None = None
    card_mb: float | None = None
    most_jobs: int = 1000


class RayJobRecord(Struct, frozen=True, kw_only=True):
    """A job as Ray lists it, as far as it is read; one that nobody submitted has no id. Times are in milliseconds."""

    status: str
    submission_id: str | None = None
    message: str | None = None
    start_time: float | None = None
    end_time: float | None = None
    driver_agent_http_address: str | None = None
    driver_node_id: str | None = None
    driver_exit_code: int | None = None


class _Logs(Struct, frozen=True):
    logs: str


class Capacity(Struct, frozen=True, kw_only=True):
    """What the cluster has, and what was in use `at` that time, where that is known."""

    total: Amount
    used: Amount | None = None
    at: float = 0.0


def address_of(settings: RaySettings, environment: Mapping[str, str]) -> str:
    """Where the dashboard is: as set, else as Ray's own variables say, unless they name no dashboard."""
    address = settings.address
    if address is None:
        told = (environment.get(name, "") for name in _ADDRESS_VARIABLES)
        address = next((each for each in told if each.startswith(("http://", "https://"))), DEFAULT_ADDRESS)
    elif "://" not in address:
        address = f"http://{address}"
    if not _is_url(address):
        raise EnvironmentFault(
            f"'{address}' is not the address of a Ray dashboard", hint=f"such an address is {DEFAULT_ADDRESS}"
        )
    return address.rstrip("/")


def _is_url(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


# What is submitted


def id_of(token: str, index: int) -> str:
    return f"{_OURS}{token}-{index}"


def mark_of(submission_id: str | None) -> Mark | None:
    """`None` for what is not ours."""
    token, _, index = (submission_id or "").removeprefix(_OURS).rpartition("-")
    is_ours = submission_id is not None and submission_id.startswith(_OURS) and token and index.isdecimal()
    return (token, int(index)) if is_ours else None


def submission_of(parcel: ClusterSubmission, index: int, card_mb: float | None) -> dict[str, Any]:
    """What is posted for an element; what is nothing is left out, as older Rays do not know every field."""
    terms = parcel.terms
    amount = amount_needed(terms, card_mb)
    fields = {
        "entrypoint": _entrypoint(parcel, index),
        "submission_id": id_of(parcel.token, index),
        "metadata": {"gpuyard": parcel.token, "name": terms.name.encode("utf-8", "backslashreplace").decode()},
        # Its supervisor's environment: how long what is told to end may take, which is three seconds otherwise.
        "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(DEFAULT_GRACE_S))}},
        "entrypoint_num_gpus": amount.gpus,
        "entrypoint_num_cpus": amount.cpus,
        "entrypoint_memory": math.ceil((amount.ram_mb or 0.0) * _MB),
        **_of_options(terms),
    }
    return {name: value for name, value in fields.items() if value}


def _entrypoint(parcel: ClusterSubmission, index: int) -> str:
    """Says so in Ray's log where the node does not see what it is to start.

    When Ray loses a job it kills its process group, and would forget what the supervisor had started in a session of
    its own. So the supervisor has a session of its own too, where there is a setsid that waits, and lives to end that.
    """
    words = shlex.join((*parcel.supervisor, str(index)))
    paths = shlex.join(dict.fromkeys(word for word in (*parcel.supervisor, parcel.folder) if word.startswith("/")))
    absent = 'echo "gpuyard: this node has no $path: nodes must see the same files there as the queue does"'
    return (
        f'for path in {paths}; do test -e "$path" || {{ {absent}; exit 127; }}; done; '
        f'set -- {words}; setsid -w true 2>/dev/null && exec setsid -w "$@"; exec "$@"'
    )


def _of_options(terms: ClusterTerms) -> dict[str, Any]:
    resources = {f"accelerator_type:{terms.need.model}": _A_LITTLE} if terms.need.model else {}
    fields: dict[str, Any] = {"entrypoint_resources": resources}
    for option in terms.options:
        name, _, text = option.partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if name not in _OPTIONS or not isinstance(value, dict):
            raise SiteRefused(
                f"Ray cannot be told '{option}'",
                hint=" or ".join(f"""{each}={{"NAME": …}}""" for each in _OPTIONS),
            )
        fields[_OPTIONS[name]] = {**fields.get(_OPTIONS[name], {}), **value}
    return fields


# What Ray answers


def records_of(body: bytes) -> list[RayJobRecord]:
    return _read(body, list[RayJobRecord])


def logs_of(body: bytes) -> bytes:
    return _read(body, _Logs).logs.encode("utf-8", "replace")


def _read(body: bytes, form: type[T]) -> T:
    """Messages are full of what programs wrote, and only the standard library takes half a character."""
    try:
        return msgspec.convert(json.loads(body), form)
    except (ValueError, msgspec.ValidationError) as error:
        raise SiteUnreachable(f"Ray's answer cannot be understood: {error}") from None


def sighting_of(record: RayJobRecord, *, is_stopped: bool, now: float) -> Sighting:
    """`is_stopped` where Ray has been told to stop it: one that is pending stays so until it would start."""
    at, reason = _standing(record, is_stopped=is_stopped, now=now)
    return Sighting(
        id=record.submission_id or "",
        at=at,
        reason=reason,
        place=_place(record),
        ended_at=record.end_time / 1000 if record.end_time else None,
        status=_status(record),
    )


def _status(record: RayJobRecord) -> int | None:
    """As shells have it. A setsid whose child was killed leaves with the signal's number, and says so."""
    code = record.driver_exit_code
    if code is not None and (code < 0 or _KILLED_UNDER_SETSID in (record.message or "")):
        return 128 + abs(code)
    return code


def _standing(record: RayJobRecord, *, is_stopped: bool, now: float) -> tuple[SiteState, str]:
    if record.status == "PENDING":
        return _waiting(record, is_stopped=is_stopped, now=now)
    if record.status == "FAILED":
        return _failure(record)
    return _PLAIN.get(record.status, SiteState.RUNNING), ""


def _waiting(record: RayJobRecord, *, is_stopped: bool, now: float) -> tuple[SiteState, str]:
    if is_stopped:
        return SiteState.CANCELLED, "before it started"
    if now - (record.start_time or 0.0) / 1000 > _NEVER_STARTED_S:
        return SiteState.LOST, "Ray never started it"
    return SiteState.PENDING, gist(record.message or "")


def _failure(record: RayJobRecord) -> tuple[SiteState, str]:
    message = record.message or ""
    if record.driver_exit_code is not None:
        return SiteState.FAILED, ""
    if "OUT_OF_MEMORY" in message or "low on memory" in message:
        return SiteState.OUT_OF_MEMORY, gist(message)
    return SiteState.LOST, gist(message)


def _place(record: RayJobRecord) -> str:
    host = urlsplit(record.driver_agent_http_address or "").hostname
    return host or record.driver_node_id or ""


def gist(text: str) -> str:
    """The line that matters: the last one of a traceback, else the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" .\t")]
    if not lines:
        return ""
    return (lines[-1] if any(line.startswith("Traceback") for line in lines) else lines[0])[:300]


# What is free


class _Load(Struct, frozen=True):
    usage: dict[str, tuple[float, float]]


class _Status(Struct, frozen=True, rename="camel"):
    time: float
    load_metrics_report: _Load | None = None


class _StatusData(Struct, frozen=True, rename="camel"):
    cluster_status: _Status | None = None


class _StatusAnswer(Struct, frozen=True):
    data: _StatusData


class _RayNode(Struct, frozen=True):
    state: str
    resources_total: dict[str, float] = {}


class _Nodes(Struct, frozen=True):
    result: list[_RayNode]


class _NodesData(Struct, frozen=True):
    result: _Nodes


class _NodesAnswer(Struct, frozen=True):
    data: _NodesData


def capacity_of(nodes: bytes, status: bytes, now: float) -> Capacity:
    """From the list of nodes, and the cluster's status, which some do not keep, or not always."""
    alive = [node.resources_total for node in _read(nodes, _NodesAnswer).data.result.result if node.state == "ALIVE"]
    told = _read(status, _StatusAnswer).data.cluster_status
    if told is None or told.load_metrics_report is None or now - told.time > _STALE_S:
        return Capacity(total=_amount(alive))
    used = {name: used for name, (used, _) in told.load_metrics_report.usage.items()}
    return Capacity(total=_amount(alive), used=_amount([used]), at=told.time)


def _amount(resources: Sequence[Mapping[str, float]]) -> Amount:
    gpus, cpus, memory = (sum(each.get(name, 0.0) for each in resources) for name in ("GPU", "CPU", "memory"))
    return Amount(gpus=gpus, cpus=cpus, ram_mb=memory / _MB)


def free_of(capacity: Capacity, ours: Sequence[tuple[RayJobRecord, Amount]]) -> Amount:
    """What nobody uses, and none of ours that is not over will. Others use what was in use, and not by ours."""
    then = _sum(amount for record, amount in ours if _was_in_use(record, capacity.at))
    now = _sum(amount for record, amount in ours if record.status in ("PENDING", "RUNNING"))
    used = _sum([capacity.used] if capacity.used is not None else [])
    rows = zip(_sum([capacity.total]), used, then, now, strict=True)
    gpus, cpus, ram_mb = (max(0.0, total - max(0.0, used - then) - now) for total, used, then, now in rows)
    return Amount(gpus=gpus, cpus=cpus, ram_mb=ram_mb)


def _sum(amounts: Iterable[Amount]) -> tuple[float, float, float]:
    figures = [(each.gpus or 0.0, each.cpus or 0.0, each.ram_mb or 0.0) for each in amounts]
    gpus, cpus, ram_mb = (math.fsum(column) for column in zip((0.0, 0.0, 0.0), *figures, strict=True))
    return gpus, cpus, ram_mb


def _was_in_use(record: RayJobRecord, at: float) -> bool:
    """At that time, as far as can be told: one that runs since may be taken for it, and then a little too much seems to
    be free, for which Ray has a line of its own."""
    if record.status == "PENDING" or (record.start_time or 0.0) / 1000 > at:
        return False
    return record.end_time is None or record.end_time / 1000 > at - _LINGER_S
