"""Why a piece of work does not start: a closed set, each with its figures, in words for people."""

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


# More names than this do not help anybody who waits.
_NAMED_STRANGERS = 3
_MEASURES = {
    ReasonKind.TOO_BUSY: ("GPU", "%"),
    ReasonKind.TOO_HUNGRY: ("power", " W"),
    ReasonKind.TOO_FULL: ("GPU memory", " MB"),
    ReasonKind.HOST_TOO_BUSY: ("CPU", "%"),
}


class Reason(Struct, frozen=True, kw_only=True):
    """`device_id` is `None` where it concerns the machine as a whole; `had` and `needed` are what was compared.
    `remedy` names the option or setting that changes it, where waiting may not."""

    kind: ReasonKind
    text: str
    device_id: str | None = None
    had: float | None = None
    needed: float | None = None
    holders: tuple[Holder, ...] = ()
    remedy: str = ""


def name_of(holder: Holder) -> str:
    label = f" ({holder.label})" if holder.label else ""
    return f"{holder.user}, pid {holder.pid}{label}"


def leased(device_id: str, holders: tuple[Holder, ...]) -> Reason:
    text = f"held by {'; '.join(map(name_of, holders))}"
    return Reason(kind=ReasonKind.LEASED, device_id=device_id, text=text, holders=holders)


def awaited(device_id: str, holders: tuple[Holder, ...]) -> Reason:
    text = f"kept for {'; '.join(map(name_of, holders))}, who came first"
    return Reason(kind=ReasonKind.AWAITED, device_id=device_id, text=text, holders=holders)


def no_room(device_id: str, had: float, needed: float, holders: tuple[Holder, ...]) -> Reason:
    beside = f", beside {'; '.join(map(name_of, holders))}" if holders else ""
    text = f"{format_size(max(0.0, had))} free, {format_size(needed)} needed{beside}"
    return Reason(kind=ReasonKind.NO_ROOM, device_id=device_id, text=text, had=had, needed=needed, holders=holders)


def too_many(device_id: str, most: int, holders: tuple[Holder, ...]) -> Reason:
    text = f"{most} may share it (max_jobs_per_device), and as many do"
    return Reason(
        kind=ReasonKind.TOO_MANY, device_id=device_id, text=text, had=float(most), needed=float(most), holders=holders
    )


def loaded(device_id: str, had: float, needed: float | None, most: float, holders: tuple[Holder, ...]) -> Reason:
    more = f" and it would add about {needed:.0f}%" if needed else ""
    text = f"{had:.0f}% busy{more}, over {most:.0f}%: one more would only slow the others"
    return Reason(kind=ReasonKind.LOADED, device_id=device_id, text=text, had=had, needed=needed, holders=holders)


def occupied(device_id: str, foreign: float, allowed: float) -> Reason:
    text = f"others hold {format_size(foreign)} of it without a lease, over {format_size(allowed)}"
    return Reason(kind=ReasonKind.OCCUPIED, device_id=device_id, text=text, had=foreign, needed=allowed)


def foreign_load(device_id: str, load: ForeignLoad, bound: float) -> Reason:
    names = [_stranger_name(stranger) for stranger in load.strangers[:_NAMED_STRANGERS]]
    more = len(load.strangers) - len(names)
    who = ", ".join(names + [f"{more} more"] * (more > 0)) or "processes outside gpuyard"
    text = (
        f"{who} keep{'s' if len(load.strangers) == 1 else ''} it {load.percent:.0f}% busy without a lease; "
        f"the limit is {bound:.0f}%"
    )
    return Reason(kind=ReasonKind.FOREIGN_LOAD, device_id=device_id, text=text, had=load.percent, needed=bound)


def _stranger_name(stranger: ForeignProcess) -> str:
    user = f", user {stranger.user}" if stranger.user else ""
    return f"{stranger.process.name or 'process'} (pid {stranger.process.pid}{user})"


def over(kind: ReasonKind, had: float | None, allowed: float | None, device_id: str | None = None) -> Reason:
    what, unit = _MEASURES[kind]
    text = f"{what} {had or 0.0:.0f}{unit} > {allowed or 0.0:.0f}{unit}"
    return Reason(kind=kind, device_id=device_id, text=text, had=had, needed=allowed)


def plain(kind: ReasonKind, text: str, device_id: str | None = None) -> Reason:
    return Reason(kind=kind, device_id=device_id, text=text)
