"""Reasons why work does not start, with their figures, texts for users, and remedies: what lets it start.

A job that waits for a lease needs no remedy: leases end by themselves. Options in remedies are those of `gpuyard
submit` and `gpuyard run`, with the arguments of `GPUScheduler`.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from gpuyard.model.lease import Holder, Need
from gpuyard.model.units import format_count


class ReasonKind(StrEnum):
    # A job that waits for one of these waits for its user, for another job, or for its time.
    BLOCKED = "blocked"
    DELAYED = "delayed"
    SUSPENDED = "suspended"
    MAKING_ROOM = "making-room"
    PREALLOCATES = "preallocates"
    # The machine, or the cluster that the job goes to.
    PAUSED = "paused"  # by a person: the queue, the job, its workspace
    RESOURCE_LIMIT = "resource-limit"  # the system starts no program, or the ledger or the configuration is unreadable
    LIMIT = "limit"  # as many run as may: of a tag, an array, a batch, a cluster, on one device
    STAGGERED = "staggered"
    HOST_TOO_BUSY = "host-too-busy"
    HOST_TOO_FULL = "host-too-full"
    HOST_ROOM = "host-room"  # RAM or CPUs that the job reserves
    DISK_FULL = "disk-full"
    POWER_LIMIT = "power-limit"  # of all devices, or the job's own of one
    ENGINE = "engine"  # the cluster has the job, or does not answer
    # Devices.
    NOT_ASKED_FOR = "not-asked-for"
    CLOSED = "closed"  # banned or drained
    UNHEALTHY = "unhealthy"
    MEMORY_GUARD = "memory-guard"
    LEASED = "leased"
    AWAITED = "awaited"  # reserved for, or behind, a request ahead
    TOO_BUSY = "too-busy"
    TOO_FULL = "too-full"
    NO_ROOM = "no-room"
    OCCUPIED = "occupied"  # by processes outside gpuyard: their memory or load
    NO_GAIN = "no-gain"  # sharing the device would not pay
    TOO_FEW = "too-few"
    NOT_LINKED = "not-linked"


# The queue itself notices when one of these ends; for all others a new sample is needed.
NOTICED_BY_QUEUE = frozenset(
    {ReasonKind.PAUSED, ReasonKind.LIMIT, ReasonKind.NOT_ASKED_FOR, ReasonKind.CLOSED, ReasonKind.TOO_FEW,
     ReasonKind.NOT_LINKED, ReasonKind.RESOURCE_LIMIT}
)  # fmt: skip

VRAM_OPTION = "--vram SIZE (in a script: vram=)"
# For a job without an estimate: how much is free now. It concerns the first waiting job of its kind alone.
START_WITH = "`--vram {}G` would start it now, if that is enough"
# What changes a reason, where waiting may not help.
REMEDIES = {
    "banned": "remove this GPU from banned and banned_names under [devices] in the configuration",
    "drained": "`gpuyard devices undrain ID` lets work start there again; only the user who drained it can",
    "unhealthy": "`gpuyard doctor` says how to repair an unhealthy GPU",
    "occupied": f"with {VRAM_OPTION} it starts beside other programs, if that much is free",
    "foreign-load": (
        "--max-gpu 100 (in a script: utilization_threshold_percent=100) lets this job start beside them; "
        "max_foreign_load_percent under [queue] in the configuration lets all jobs"
    ),
    "loaded": "raise max_load_percent under [packing] in the configuration",
    "no-gain": "lower min_gain_percent under [packing] in the configuration",
    "too-deep": "min_gain_percent = -100 under [packing] in the configuration shares GPUs by memory alone",
    "too-many": "raise max_jobs_per_device under [packing] in the configuration",
    "too-busy": "--max-gpu (in a script: utilization_threshold_percent=) is the job's own limit",
    "too-hungry": "--max-power-w (in a script: power_threshold_w=) is the job's own limit",
    "too-full": "--max-gpu-mem-mb is the job's own limit",
    "host-too-busy": "--max-cpu is the job's own limit",
    "host-too-full": "--min-free-mem-mb is the job's own limit",
    "not-linked": (
        "without --linked and --same-node (in a script: linked=, same_node=) it gets the best-linked GPUs that are free"
    ),
    "host-memory": (
        "--ram (in a script: ram=) is what the job reserves; keep_free under [host] in the configuration stays free"
    ),
    "host-cpus": (
        "--cpus (in a script: cpus=) is what the job reserves; max_cpu_load under [host] in the configuration is the "
        "limit for all jobs"
    ),
    "power": "raise max_gpu_power_w under [host] in the configuration",
    "tag-limit": "raise max_jobs_per_gpu of the workspace, or the tag's limit in [queue.tags]",
    "array-limit": "submit with a larger N in --array RANGE%N, or a larger --concurrency of a batch",
    "cpu-limit": "raise cpu_jobs under [queue] in the configuration",
}


class Reason(Struct, frozen=True):
    """Why a job waits, with the compared figures. `is_leased`: leases alone are the reason, or a drain or ban, so that
    no new measurement changes it."""

    kind: ReasonKind
    text: str
    device_id: str | None = None  # None: it concerns the whole machine
    had: float | None = None
    needed: float | None = None
    holders: tuple[Holder, ...] = ()
    remedy: str = ""  # the option or setting that changes it, where waiting may not help
    is_leased: bool = False
    brief: str = ""  # the text without figures (`brief_of`), with `{beside}` where holders may be named


def brief_of(reason: Reason) -> str:
    """Return the reason without figures: a clause, or one that begins with "until"."""
    beside = f" beside {name_holders(reason.holders)}" if reason.holders else ""
    return reason.brief.replace("{beside}", beside) or reason.text


def first_runs_brief(holders: Sequence[Holder]) -> str:
    have, they = ("has", "it uses (first run)") if len(holders) == 1 else ("have", "they use (first runs)")
    return f"until {name_holders(holders)} {have} shown how much memory {they}"


def name_holders(holders: Sequence[Holder]) -> str:
    """Return `job 1 of anne, job 2 of anne and 3 more`."""
    names = list(dict.fromkeys(map(describe_holder, holders)))
    more = len(names) - 3
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:3])} and {more} more"


def describe_holder(holder: Holder) -> str:
    """Return `job 17 of anne` for a job of a queue, whose pid is the daemon's; else user, pid and label."""
    if job_of(holder) is not None:
        return f"{holder.label} of {holder.user}"
    label = f" ({holder.label})" if holder.label else ""
    return f"{holder.user}, pid {holder.pid}{label}"


def job_of(holder: Holder) -> int | None:
    """Return the id of the job that a queue holds a lease or a place in the queue for; None for any other holder."""
    word, _, number = (holder.label or "").partition(" ")
    is_id = word == "job" and number.isascii() and number.isdigit() and len(number) <= 18
    return int(number) if is_id else None


def list_holders(holders: Sequence[Holder]) -> str:
    """Return a text that names the first eight holders, and counts the others."""
    more = len(holders) - 8
    names = "; ".join(map(describe_holder, holders[:8]))
    return f"{names}; and {more} more" if more > 0 else names


def awaited(device_id: str | None, holders: tuple[Holder, ...], why: str = "") -> Reason:
    text = f"reserved for {list_holders(holders)}, ahead in the queue{why}"
    return Reason(ReasonKind.AWAITED, text, device_id, holders=holders, is_leased=True)


def over(kind: ReasonKind, had: float | None, allowed: float | None, device_id: str | None = None) -> Reason:
    what, unit = {
        ReasonKind.TOO_BUSY: ("GPU", "%"),
        ReasonKind.POWER_LIMIT: ("power", " W"),
        ReasonKind.TOO_FULL: ("GPU memory", " MB"),
        ReasonKind.HOST_TOO_BUSY: ("CPU", "%"),
    }[kind]
    text = f"{what} {had or 0.0:.0f}{unit} > {allowed or 0.0:.0f}{unit}"
    return Reason(kind, text, device_id, had, allowed)


def limit_reached(what: str, most: int, remedy: str = "") -> Reason:
    """Return the reason that `most` of `what` already run; `what` begins with a plural, such as "jobs of its array"."""
    noun, _, rest = what.partition(" ")
    counted = f"{most} {noun.removesuffix('s') if most == 1 else noun} {rest}"
    text = f"limit reached: at most {counted} at a time" if most else f"{what} may not run: their limit is 0"
    return Reason(ReasonKind.LIMIT, text, had=float(most), needed=float(most), remedy=REMEDIES.get(remedy, ""))


def relevant_reasons(need: Need, reasons: Sequence[Reason]) -> list[Reason]:
    """Return the reasons that concern the machine or a requested device, without the count of devices."""
    concerned = (None, *(need.only or ()))
    return [each for each in reasons if each.device_id in concerned and each.kind is not ReasonKind.TOO_FEW]


def group_by_device(reasons: Sequence[Reason], names: Mapping[str, str]) -> list[str]:
    """Return a text for each different reason with the short names of its devices: `GPU 0, 1: drained`."""
    places: dict[str, list[str]] = {}
    for reason in reasons:
        at = places.setdefault(reason.text, [])
        if reason.device_id is not None:
            at.append(names.get(reason.device_id) or reason.device_id)
    return [f"GPU {', '.join(at)}: {text}" if at else text for text, at in places.items()]


def describe_wait(need: Need, reasons: Sequence[Reason], names: Mapping[str, str]) -> str:
    """Return what the request waits for and why. `names` maps device ids to short names: {"GPU-17ab": "0"}."""
    why = "; ".join(group_by_device(reasons, names))
    return f"waiting for {format_count(need.devices, 'GPU') if need.devices else 'the machine'}: {why}"
