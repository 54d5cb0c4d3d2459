"""Reasons why work does not start: a closed set of kinds, each with its figures and a text for users."""

from enum import StrEnum

from msgspec import Struct

from gpuyard.core.lease import Holder
from gpuyard.core.scheduling.foreign_load import ForeignLoad, ForeignProcess
from gpuyard.core.units import format_size


class ReasonKind(StrEnum):
    NOT_ASKED_FOR = "not-asked-for"
    BANNED = "banned"
    UNHEALTHY = "unhealthy"
    LEASED = "leased"
    AWAITED = "awaited"
    NO_ROOM = "no-room"
    TOO_MANY = "too-many"
    LOADED = "loaded"
    OCCUPIED = "occupied"
    FOREIGN_LOAD = "foreign-load"
    TOO_BUSY = "too-busy"
    TOO_HUNGRY = "too-hungry"
    TOO_FULL = "too-full"
    HOST_TOO_BUSY = "host-too-busy"
    HOST_TOO_FULL = "host-too-full"
    TOO_FEW = "too-few"
    PAUSED = "paused"
    HELD = "held"
    BLOCKED = "blocked"
    DELAYED = "delayed"
    BEHIND = "behind"
    TAG_LIMIT = "tag-limit"
    ARRAY_LIMIT = "array-limit"
    CPU_LIMIT = "cpu-limit"
    NO_STORE = "no-store"
    NO_ENGINE = "no-engine"
    ENGINE_LIMIT = "engine-limit"
    PENDING = "pending"
    MAKING_ROOM = "making-room"
    SUSPENDED = "suspended"
    STAGGERED = "staggered"


# A text names at most this many foreign processes.
_NAMED_PROCESSES = 3
_MEASURES = {
    ReasonKind.TOO_BUSY: ("GPU", "%"),
    ReasonKind.TOO_HUNGRY: ("power", " W"),
    ReasonKind.TOO_FULL: ("GPU memory", " MB"),
    ReasonKind.HOST_TOO_BUSY: ("CPU", "%"),
}


class Reason(Struct, frozen=True):
    """`device_id` is None where the reason concerns the whole machine; `had` and `needed` are the compared figures.

    `remedy` names the option or setting that changes it, where waiting may not help.
    """

    kind: ReasonKind
    text: str
    device_id: str | None = None
    had: float | None = None
    needed: float | None = None
    holders: tuple[Holder, ...] = ()
    remedy: str = ""


def describe_holder(holder: Holder) -> str:
    label = f" ({holder.label})" if holder.label else ""
    return f"{holder.user}, pid {holder.pid}{label}"


def _list_holders(holders: tuple[Holder, ...]) -> str:
    return "; ".join(map(describe_holder, holders))


def leased(device_id: str, holders: tuple[Holder, ...]) -> Reason:
    return Reason(ReasonKind.LEASED, f"held by {_list_holders(holders)}", device_id, holders=holders)


def awaited(device_id: str, holders: tuple[Holder, ...]) -> Reason:
    text = f"reserved for {_list_holders(holders)}, ahead in the queue"
    return Reason(ReasonKind.AWAITED, text, device_id, holders=holders)


def no_room(device_id: str, had: float, needed: float, holders: tuple[Holder, ...]) -> Reason:
    beside = f", beside {_list_holders(holders)}" if holders else ""
    text = f"{format_size(max(0.0, had))} free, {format_size(needed)} needed{beside}"
    return Reason(ReasonKind.NO_ROOM, text, device_id, had, needed, holders)


def too_many(device_id: str, limit: int, holders: tuple[Holder, ...]) -> Reason:
    text = f"limit reached: {limit} jobs may share it (max_jobs_per_device)"
    return Reason(ReasonKind.TOO_MANY, text, device_id, float(limit), float(limit), holders)


def loaded(device_id: str, had: float, needed: float | None, limit: float, holders: tuple[Holder, ...]) -> Reason:
    more = f"; this job would add about {needed:.0f}%" if needed else ""
    text = f"{had:.0f}% busy, load limit {limit:.0f}%{more}"
    return Reason(ReasonKind.LOADED, text, device_id, had, needed, holders)


def occupied(device_id: str, foreign: float, allowed: float) -> Reason:
    text = f"processes outside gpuyard hold {format_size(foreign)} of it, over {format_size(allowed)}"
    return Reason(ReasonKind.OCCUPIED, text, device_id, foreign, allowed)


def foreign_load(device_id: str, load: ForeignLoad, limit: float) -> Reason:
    names = [_describe_process(process) for process in load.processes[:_NAMED_PROCESSES]]
    more = len(load.processes) - len(names)
    who = ", ".join(names + [f"{more} more"] * (more > 0)) or "processes outside gpuyard"
    text = (
        f"{who} keep{'s' if len(load.processes) == 1 else ''} it {load.percent:.0f}% busy without a lease; "
        f"the limit is {limit:.0f}%"
    )
    return Reason(ReasonKind.FOREIGN_LOAD, text, device_id, load.percent, limit)


def _describe_process(foreign: ForeignProcess) -> str:
    user = f", user {foreign.user}" if foreign.user else ""
    return f"{foreign.process.name or 'process'} (pid {foreign.process.pid}{user})"


def over(kind: ReasonKind, had: float | None, allowed: float | None, device_id: str | None = None) -> Reason:
    """Return the reason that a figure exceeds its limit."""
    what, unit = _MEASURES[kind]
    text = f"{what} {had or 0.0:.0f}{unit} > {allowed or 0.0:.0f}{unit}"
    return Reason(kind, text, device_id, had, allowed)
