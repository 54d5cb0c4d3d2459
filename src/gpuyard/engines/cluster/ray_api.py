"""Requests and responses of Ray's Jobs REST API. Pure: builds and parses, and sends nothing.

How Ray behaves beyond its manual (2.60):
- A job's `start_time` is when it was submitted; nothing says when it started to run.
- A job has an exit code if its command ended by itself, and none if Ray lost it: its supervising actor or its node
  died, or it was never started, which Ray gives up after 15 minutes.
- A request that breaks off during a submission may leave the job pending forever.
- Ray updates what is in use every 5 s.
"""

import contextlib
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from gpuyard.config import RayConfig
from gpuyard.engines.cluster.site import (
    ClusterNode,
    ClusterSubmission,
    ElementRef,
    Sighting,
    SiteRefused,
    SiteState,
    SiteUnreachable,
)
from gpuyard.engines.common.spawn_program import BY_SIGNAL
from gpuyard.errors import EnvironmentFault
from gpuyard.model.cluster_terms import Amount, Basis, ClusterTerms, amount_needed, impossible, whole_gpu_basis
from gpuyard.model.job import SiteRequest
from gpuyard.model.job_spec import DEFAULT_GRACE_S
from gpuyard.model.printable_text import LONGEST_MESSAGE, printable
from gpuyard.model.units import MB

T = TypeVar("T")

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_OURS = "gpuyard-"
_NODE_LABEL = "ray.io/node-id"
# Options of `ray job submit` that are supported here, and the field of each.
_OPTIONS = {
    "--entrypoint-resources": "entrypoint_resources",
    "--entrypoint-label-selector": "entrypoint_label_selector",
}
_PLAIN = {"SUCCEEDED": SiteState.SUCCEEDED, "FAILED": SiteState.FAILED, "STOPPED": SiteState.CANCELLED}


class RayJobRecord(Struct, frozen=True, kw_only=True):
    """The fields we use of a job in Ray's list. A job that was not submitted has no id. Times are in milliseconds."""

    status: str
    submission_id: str | None = None
    message: str | None = None
    start_time: float | None = None
    end_time: float | None = None
    driver_agent_http_address: str | None = None
    driver_node_id: str | None = None
    driver_exit_code: int | None = None


def address_of(settings: RayConfig, environment: Mapping[str, str]) -> str:
    """Return the dashboard's address: the configured one, else a URL in one of Ray's variables, else the default."""
    address = settings.address
    if address is None:
        values = (environment.get(name, "") for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"))
        address = next((each for each in values if each.startswith(("http://", "https://"))), DEFAULT_ADDRESS)
    elif "://" not in address:
        address = f"http://{address}"
    with contextlib.suppress(ValueError):
        parts = urlsplit(address)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return address.rstrip("/")
    hint = f"an example is {DEFAULT_ADDRESS}"
    raise EnvironmentFault(f"'{address}' is not the address of a Ray dashboard", hint=hint)


def id_of(token: str, index: int) -> str:
    return f"{_OURS}{token}-{index}"


def ref_of(submission_id: str | None) -> ElementRef | None:
    """Return None for a job that is not ours."""
    token, _, index = (submission_id or "").removeprefix(_OURS).rpartition("-")
    is_ours = submission_id is not None and submission_id.startswith(_OURS) and token and index.isdecimal()
    return (token, int(index)) if is_ours else None


def request_of(submission: ClusterSubmission, index: int, card_mb: float | None) -> dict[str, Any]:
    """Return the request that submits an element, without empty fields: older versions of Ray do not know them all."""
    terms = submission.terms
    amount = amount_needed(terms, card_mb)
    command = shlex.join((*submission.supervisor, str(index)))
    seen = (each for each in (*submission.supervisor, submission.folder) if each.startswith("/"))
    paths = shlex.join(dict.fromkeys(seen))
    absent = 'echo "gpuyard: this node has no $path: nodes must see the same files there as the queue does"'
    fields = {
        # When Ray loses a job it kills the job's process group. Then the program, in a session of its own, would go on.
        # So the supervisor has a session of its own too, if there is a `setsid` that waits, and survives to end it.
        "entrypoint": (
            f'for path in {paths}; do test -e "$path" || {{ {absent}; exit 127; }}; done; '
            f'set -- {command}; setsid -w true 2>/dev/null && exec setsid -w "$@"; exec "$@"'
        ),
        "submission_id": id_of(submission.token, index),
        "metadata": {"gpuyard": submission.token, "name": terms.name.encode("utf-8", "backslashreplace").decode()},
        # How long Ray waits after SIGTERM; its default is 3 s.
        "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(DEFAULT_GRACE_S))}},
        "entrypoint_num_gpus": amount.gpus,
        "entrypoint_num_cpus": amount.cpus,
        "entrypoint_memory": math.ceil((amount.ram_mb or 0.0) * MB),
        **_option_fields(terms, submission.without),
    }
    return {name: value for name, value in fields.items() if value}


def described(submission: ClusterSubmission, index: int, card_mb: float | None) -> SiteRequest:
    terms, fields = submission.terms, request_of(submission, index, card_mb)
    is_part = float(fields.get("entrypoint_num_gpus", 0)) % 1 > 0
    origins = {
        "entrypoint_num_gpus": terms.memory_basis if is_part else whole_gpu_basis(terms),
        "entrypoint_num_cpus": Basis.DECLARED if terms.cpus else Basis.DEFAULT,
        "entrypoint_memory": terms.ram_basis,
    }
    sent = {name: each for name, each in origins.items() if name in fields}
    return SiteRequest(text=json.dumps(fields), origins=sent)


def _option_fields(terms: ClusterTerms, without: Sequence[str] = ()) -> dict[str, Any]:
    # As much as Ray's own `accelerator_type` requests of the resource that stands for a GPU model.
    resources = {f"accelerator_type:{terms.need.model}": 0.001} if terms.need.model else {}
    labels = {_NODE_LABEL: f"!in({','.join(without)})"} if without else {}
    fields: dict[str, Any] = {"entrypoint_resources": resources, "entrypoint_label_selector": labels}
    for option in terms.options:
        name, _, text = option.partition("=")
        value = None
        with contextlib.suppress(ValueError):
            value = json.loads(text)
        if name not in _OPTIONS or not isinstance(value, dict):
            raise SiteRefused(
                f"the option '{option}' is not supported for Ray",
                hint="supported: " + ", ".join(f"""{each}={{"NAME": …}}""" for each in _OPTIONS),
            )
        fields[_OPTIONS[name]] = {**fields.get(_OPTIONS[name], {}), **value}
    return fields


def records_of(body: bytes) -> list[RayJobRecord]:
    return _read(body, list[RayJobRecord])


def logs_of(body: bytes) -> bytes:
    return _read(body, str, "logs").encode("utf-8", "replace")


def _read(body: bytes, form: type[T], *path: str) -> T:
    """Parse a response, or the part of it at `path`. Messages may hold lone surrogates, which only `json` accepts."""
    try:
        content = json.loads(body)
        for name in path:
            content = content[name]
        return msgspec.convert(content, form)
    except (ValueError, TypeError, LookupError, msgspec.ValidationError) as error:
        raise SiteUnreachable(f"Ray's answer cannot be understood: {error}") from None


def sighting_of(record: RayJobRecord, *, is_stopped: bool = False, pending_s: float = 0.0) -> Sighting:
    """Ray keeps a pending job that was stopped pending until it would start. `pending_s`: for how long, by our
    clock."""
    at, reason = _state(record, is_stopped=is_stopped, pending_s=pending_s)
    status = record.driver_exit_code
    # `setsid` exits with a signal's number and a message if its child was killed.
    if status is not None and (status < 0 or "did not exit normally" in (record.message or "")):
        status = BY_SIGNAL + abs(status)
    return Sighting(
        id=record.submission_id or "",
        at=at,
        reason=reason,
        place=urlsplit(record.driver_agent_http_address or "").hostname or record.driver_node_id or "",
        node=record.driver_node_id or "",
        ended_at=record.end_time / 1000 if record.end_time else None,
        status=status,
    )


def _state(record: RayJobRecord, *, is_stopped: bool, pending_s: float) -> tuple[SiteState, str]:
    message = record.message or ""
    if record.status == "PENDING" and is_stopped:
        return SiteState.CANCELLED, "before it started"
    if record.status == "PENDING":
        is_lost = pending_s > 20 * 60
        return (SiteState.LOST, "Ray never started it") if is_lost else (SiteState.PENDING, gist(message))
    if record.status == "FAILED" and record.driver_exit_code is None:
        is_out_of_memory = "OUT_OF_MEMORY" in message or "low on memory" in message
        return SiteState.OUT_OF_MEMORY if is_out_of_memory else SiteState.LOST, gist(message)
    return _PLAIN.get(record.status, SiteState.RUNNING), ""


def gist(text: str) -> str:
    """Return the line that matters: the last one of a traceback, else the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" .\t")]
    if not lines:
        return ""
    return printable(lines[-1] if any(line.startswith("Traceback") for line in lines) else lines[0], LONGEST_MESSAGE)


class Capacity(Struct, frozen=True, kw_only=True):
    """What each node has, and what was in use on all together at the time `at`, if known."""

    nodes: tuple[Amount, ...]
    used: Amount | None = None
    at: float = 0.0


class _RayNode(Struct, frozen=True):
    state: str
    node_id: str = ""
    node_ip: str = ""
    resources_total: dict[str, float] = {}


def capacity_of(nodes: bytes, status: bytes) -> Capacity:
    each_has = tuple(map(_amount, resources_of(nodes)))
    path = ("data", "clusterStatus")
    if _read(status, dict[str, Any], "data").get(path[1]) is None:
        return Capacity(nodes=each_has)
    at = _read(status, float, *path, "time")
    if _read(status, dict[str, Any], *path).get("loadMetricsReport") is None:
        return Capacity(nodes=each_has)
    usage = _read(status, dict[str, tuple[float, float]], *path, "loadMetricsReport", "usage")
    return Capacity(nodes=each_has, used=_amount({name: used for name, (used, _) in usage.items()}), at=at)


def resources_of(nodes: bytes, without: Sequence[str] = ()) -> list[dict[str, float]]:
    """Return the resources that each node has in total, by Ray's names, but for the nodes with these ids."""
    listed = _read(nodes, list[_RayNode], "data", "result", "result")
    return [node.resources_total for node in listed if node.state == "ALIVE" and node.node_id not in without]


def nodes_of(nodes: bytes) -> list[ClusterNode]:
    alive = [each for each in _read(nodes, list[_RayNode], "data", "result", "result") if each.state == "ALIVE"]
    return [ClusterNode(name=each.node_id, place=f"{each.node_ip} ({each.node_id[:8]})") for each in alive]


def check_request(node: ClusterNode, script: str, id_: str) -> dict[str, Any]:
    return {
        "entrypoint": shlex.join(("env", "-u", "CUDA_VISIBLE_DEVICES", "sh", "-c", script)),
        "submission_id": id_,
        "entrypoint_label_selector": {_NODE_LABEL: node.name},
    }


def record_of(body: bytes) -> RayJobRecord:
    return _read(body, RayJobRecord)


def never_fits(terms: ClusterTerms, card_mb: float | None, nodes: Sequence[Mapping[str, float]]) -> str | None:
    """Return why no node can ever run a job on these terms; None if one can, or if there is no node yet."""
    special: Mapping[str, float] = _option_fields(terms)["entrypoint_resources"]
    suitable = [each for each in nodes if all(each.get(name, 0.0) >= amount for name, amount in special.items())]
    if nodes and not suitable:
        return f"no node of ray has {', '.join(f'{amount:g} {name}' for name, amount in special.items())}"
    return impossible("ray", [_amount(each) for each in suitable], amount_needed(terms, card_mb))


def _amount(resources: Mapping[str, float]) -> Amount:
    gpus, cpus, memory = (resources.get(name, 0.0) for name in ("GPU", "CPU", "memory"))
    return Amount(gpus=gpus, cpus=cpus, ram_mb=memory / MB)


def free_of(capacity: Capacity, ours: Sequence[tuple[RayJobRecord, Amount]]) -> Amount:
    """Return the total minus what other users use and what our live jobs need. Others use what was in use, minus what
    our jobs used at that time. That may be wrong for a job that started after it; then too much seems free, and the job
    waits in Ray's own queue. A job's resources may count as used for a second after its end."""

    def was_in_use(record: RayJobRecord) -> bool:
        has_begun = record.status != "PENDING" and (record.start_time or 0.0) / 1000 <= capacity.at
        return has_begun and (record.end_time is None or record.end_time / 1000 > capacity.at - 1.0)

    def free(amount_of: Callable[[Amount], float | None]) -> float:
        then = math.fsum(amount_of(amount) or 0.0 for record, amount in ours if was_in_use(record))
        now = math.fsum(amount_of(amount) or 0.0 for record, amount in ours if record.status in ("PENDING", "RUNNING"))
        used = 0.0 if capacity.used is None else amount_of(capacity.used) or 0.0
        return max(0.0, math.fsum(amount_of(each) or 0.0 for each in capacity.nodes) - max(0.0, used - then) - now)

    return Amount(
        gpus=free(lambda each: each.gpus), cpus=free(lambda each: each.cpus), ram_mb=free(lambda each: each.ram_mb)
    )
