"""Where a piece of work may go: reserve and measure, those who came first first, all devices or none.

Free memory on a device is its capacity, less what strangers hold, less for each lease the larger of what it reserved
and what it was measured to use. A lease that has not allocated yet is charged what it reserved; one that grew, what it
uses; a stranger, what it holds. Where the driver hides what a lease holds, all that nobody else was seen to use counts
against its reservation first, and what exceeds that is a stranger's.

Those ahead in the line are given theirs first, on paper: what they could have now, or, where that is not all they need,
every device that would serve them. Nobody behind takes that away. One who has waited long is kept every device it could
use once leases end, so that a stream of small work does not hold up a large one for ever. But one whom the end of all
leases would not help (a stranger is in its way, or the machine is too busy for it) holds up nobody.
"""

import copy
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from gpuyard.core import reasons
from gpuyard.core.model import Claim, Device, Holder, Host, Lease, Need, Share, Snapshot, Ticket
from gpuyard.core.reasons import Reason, ReasonKind

PATIENCE_S = 60.0
# A screen or an idle notebook on a card does not make it a taken one.
_TINY_MB, _TINY_SHARE = 1024.0, 0.05
_IDLE_PERCENT = 10.0
# A driver may hide processes, but not what they hold.
_NOBODY_MB = 64.0


class View(Struct, frozen=True, kw_only=True):
    """`measured` is the memory that a lease's processes hold on a device, by lease id and device id; those ahead are in
    the order of the line."""

    now: float
    snapshot: Snapshot
    leases: tuple[Lease, ...] = ()
    measured: Mapping[tuple[str, str], float | None] = {}
    ahead: tuple[Ticket, ...] = ()


class Choice(Struct, frozen=True, kw_only=True):
    """A claim, or the reasons why there is none."""

    claim: Claim | None
    reasons: tuple[Reason, ...] = ()


class _Promise(Struct, frozen=True, kw_only=True):
    """A share that is taken, or kept for somebody who is ahead."""

    share: Share
    holder: Holder
    measured_mb: float | None = None
    is_kept: bool = False


_Promises = dict[str, list[_Promise]]


def choose(need: Need, view: View) -> Choice:
    """The devices that suit `need` best, all of them or none."""
    board = Board(view)
    choice = board.choose(need)
    for ticket in view.ahead:
        if choice.claim is None:
            break  # whoever else is ahead only takes more away
        board.keep_for(ticket)
        choice = board.choose(need)
    return choice


class Board:
    """Who has what, and for whom what is kept, on paper: one who plans several starts notes each before the next."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._devices = _whole_or_parts(view.snapshot)
        self._promises = _granted(view)

    def copy(self) -> "Board":
        other = copy.copy(self)
        other._promises = {device_id: list(promises) for device_id, promises in self._promises.items()}  # noqa: SLF001
        return other

    def without(self, lease_ids: frozenset[str]) -> "Board":
        """As it will be when these leases have ended."""
        view = self._view
        gone = [lease for lease in view.leases if lease.id in lease_ids]
        devices = []
        for device in view.snapshot.devices:
            granted = _granted(view).get(device.id, [])
            frees = any(lease.on(device.id) for lease in gone)
            devices.append(_without(granted, device) if frees else device)
        left = tuple(lease for lease in view.leases if lease.id not in lease_ids)
        snapshot = msgspec.structs.replace(view.snapshot, devices=tuple(devices))
        return Board(msgspec.structs.replace(view, snapshot=snapshot, leases=left))

    def has_room(self) -> bool:
        """Whether there is a device that nobody has alone: otherwise nothing that needs one can start."""
        for device in self._devices:
            for promise in self._promises.get(device.id, ()):
                if promise.share.is_exclusive:
                    break
            else:
                return True
        return False

    def choose(self, need: Need) -> Choice:
        return _choose(need, self._view.snapshot, self._devices, self._promises)

    def take(self, claim: Claim, holder: Holder) -> None:
        """Notes a start: it has its shares, and has not used any memory yet."""
        self._note(claim.shares, holder, measured_mb=0.0)

    def keep_for(self, ticket: Ticket) -> None:
        """Notes what nobody behind may take from one who waits in the ledger's line."""
        claim = self.choose(ticket.need).claim
        shares = claim.shares if claim is not None else _awaited(ticket, self._view, self._promises)
        self._note(shares, ticket.holder, is_kept=True)

    def reserve(self, need: Need, holder: Holder) -> bool:
        """Notes every device that would serve the first in the queue once leases end: nothing may delay it.

        Whether there are enough of them: one whom the end of all leases would not help is kept nothing.
        """
        granted = _granted(self._view)
        devices = [
            device
            for device in self._devices
            if _refusal(need, _without(granted.get(device.id, []), device), []) is None
        ]
        if len(devices) < need.devices or _host_refusals(need, self._view.snapshot.host):
            return False
        # Whoever joined one that bears only so much load would keep it loaded.
        is_alone = need.is_exclusive or need.bounds_load
        shares = (msgspec.structs.replace(_share_of(need, device), is_exclusive=is_alone) for device in devices)
        self._note(tuple(shares), holder, is_kept=True)
        return True

    def _note(
        self, shares: Sequence[Share], holder: Holder, *, measured_mb: float | None = None, is_kept: bool = False
    ) -> None:
        for share in shares:
            promise = _Promise(share=share, holder=holder, measured_mb=measured_mb, is_kept=is_kept)
            self._promises.setdefault(share.device_id, []).append(promise)


def free_memory(device: Device, view: View) -> float | None:
    """What a shared lease could still reserve on the device; `None` where its size is unknown."""
    return _free(device, _granted(view).get(device.id, []))


def in_line(tickets: Sequence[Ticket]) -> list[Ticket]:
    """The highest priority first, then whoever has waited longest."""
    return sorted(tickets, key=lambda ticket: (-ticket.priority, ticket.since, ticket.id))


def _granted(view: View) -> _Promises:
    promises: _Promises = {}
    for lease in view.leases:
        for share in lease.shares:
            measured = view.measured.get((lease.id, share.device_id))
            promise = _Promise(share=share, holder=lease.holder, measured_mb=measured)
            promises.setdefault(share.device_id, []).append(promise)
    return promises


def _awaited(ticket: Ticket, view: View, promises: _Promises) -> tuple[Share, ...]:
    """What nobody may take from one who waits for more; nothing where only strangers could help it."""
    need, devices = ticket.need, _whole_or_parts(view.snapshot)
    has_waited = view.now - ticket.since > PATIENCE_S
    now = [device for device in devices if _refusal(need, device, promises.get(device.id, [])) is None]
    if not now and not has_waited:
        return ()
    granted = _granted(view)
    later = [device for device in devices if _refusal(need, _without(granted.get(device.id, []), device), []) is None]
    if len(later) < need.devices or _host_refusals(need, view.snapshot.host):
        return ()
    return tuple(_share_of(need, device) for device in (later if has_waited else now))


def _without(granted: Sequence[_Promise], device: Device) -> Device:
    """The device as it will be when its leases have ended: how busy they keep it says nothing about then."""
    if not granted:
        return device
    capacity, foreign = _capacity(device), _foreign(device, granted)
    return msgspec.structs.replace(
        device,
        memory_used_mb=foreign,
        memory_free_mb=None if capacity is None else capacity - foreign,
        utilization_percent=None,
        power_draw_w=None,
    )


def _choose(need: Need, snapshot: Snapshot, devices: Sequence[Device], promises: _Promises) -> Choice:
    told = _host_refusals(need, snapshot.host)
    is_held_up = bool(told)
    if not need.devices:
        return Choice(claim=None if is_held_up else Claim(shares=()), reasons=tuple(told))
    fitting = []
    for device in devices:
        refusal = _refusal(need, device, promises.get(device.id, []))
        if refusal is None:
            fitting.append(device)
        else:
            told.append(refusal)
    if len(fitting) < need.devices:
        told.append(reasons.plain(ReasonKind.TOO_FEW, f"{len(fitting)} of {need.devices} devices are to be had now"))
    if is_held_up or len(fitting) < need.devices:
        return Choice(claim=None, reasons=tuple(told))
    best = sorted(fitting, key=lambda device: _tightness(device, promises.get(device.id, [])))
    chosen = sorted(best[: need.devices], key=lambda device: (device.vendor, device.index or 0, device.id))
    return Choice(claim=Claim(shares=tuple(_share_of(need, device) for device in chosen)))


def _whole_or_parts(snapshot: Snapshot) -> tuple[Device, ...]:
    """A card that is split is used through its parts; an unhealthy one is there to be told of."""
    split = {device.parent for device in snapshot.devices}
    return tuple(device for device in snapshot.devices if device.id not in split)


def _share_of(need: Need, device: Device) -> Share:
    return Share(device_id=device.id, memory_mb=need.memory_mb, is_exclusive=need.is_exclusive)


def _tightness(device: Device, promises: Sequence[_Promise]) -> tuple[float, int, str]:
    """The least room that is enough, so that large rooms stay for large work."""
    free = _free(device, promises)
    return (free if free is not None else float("inf"), device.index or 0, device.id)


def _host_refusals(need: Need, host: Host) -> list[Reason]:
    found = []
    if _exceeds(host.cpu_percent, need.max_cpu_percent):
        found.append(reasons.over(ReasonKind.HOST_TOO_BUSY, host.cpu_percent, need.max_cpu_percent))
    available = host.memory_available_mb
    if need.min_host_memory_mb is not None and available is not None and available < need.min_host_memory_mb:
        text = f"{available:.0f} MB of RAM available < {need.min_host_memory_mb:.0f} MB"
        found.append(reasons.plain(ReasonKind.HOST_TOO_FULL, text))
    return found


def _refusal(need: Need, device: Device, promises: Sequence[_Promise]) -> Reason | None:
    """The first thing that speaks against the device."""
    unsuitable = _unsuitable(need, device) or _taken(need, device, promises)
    if unsuitable is not None:
        return unsuitable
    if need.ignores_health:
        # What a shared lease reserves has to be there all the same.
        return None if need.is_exclusive else _crowded(need, device, promises)
    if not device.healthy:
        return reasons.plain(ReasonKind.UNHEALTHY, f"unhealthy: {device.fault}", device.id)
    return _beyond_bounds(need, device) or _crowded(need, device, promises)


def _unsuitable(need: Need, device: Device) -> Reason | None:
    if need.only is not None and device.id not in need.only:
        return reasons.plain(ReasonKind.NOT_ASKED_FOR, "not among those asked for", device.id)
    if device.id in need.banned:
        return reasons.plain(ReasonKind.BANNED, "banned", device.id)
    if not is_of_kind(need, device):
        return reasons.plain(ReasonKind.NOT_ASKED_FOR, "of another make than asked for", device.id)
    return None


def is_of_kind(need: Need, device: Device) -> bool:
    if need.vendor is not None and device.vendor is not need.vendor:
        return False
    return need.model is None or need.model.lower() in (device.name or "").lower()


def _taken(need: Need, device: Device, promises: Sequence[_Promise]) -> Reason | None:
    """An exclusive lease goes beside nobody, and nobody beside it."""
    in_the_way = [promise for promise in promises if need.is_exclusive or promise.share.is_exclusive]
    if not in_the_way:
        return None
    holders = tuple(promise.holder for promise in in_the_way)
    if all(promise.is_kept for promise in in_the_way):
        return reasons.awaited(device.id, holders)
    return reasons.leased(device.id, tuple(promise.holder for promise in in_the_way if not promise.is_kept))


def _beyond_bounds(need: Need, device: Device) -> Reason | None:
    bounds = (
        (ReasonKind.TOO_BUSY, device.utilization_percent, need.max_utilization_percent),
        (ReasonKind.TOO_HUNGRY, device.power_draw_w, need.max_power_w),
        (ReasonKind.TOO_FULL, device.memory_used_mb, need.max_memory_used_mb),
    )
    broken = (bound for bound in bounds if _exceeds(bound[1], bound[2]))
    return next((reasons.over(*bound, device.id) for bound in broken), None)


def _crowded(need: Need, device: Device, promises: Sequence[_Promise]) -> Reason | None:
    free = _free(device, promises)
    if need.memory_mb is not None and free is not None and free < need.memory_mb:
        return reasons.no_room(device.id, free, need.memory_mb, tuple(promise.holder for promise in promises))
    if not need.is_exclusive and free is None:
        return reasons.plain(ReasonKind.NO_ROOM, "its memory is unknown, so it cannot be shared", device.id)
    if need.is_exclusive and need.memory_mb is None:
        return _strangers(device)
    return None


def _strangers(device: Device) -> Reason | None:
    """For work that has not said what it needs, a card must be as good as empty."""
    capacity, used = _capacity(device), device.memory_used_mb
    allowed = max(_TINY_MB, _TINY_SHARE * capacity) if capacity is not None else _TINY_MB
    if used is not None and used > allowed:
        return reasons.occupied(device.id, used, allowed)
    if device.processes == () and used is not None and used < _NOBODY_MB:
        return None  # how busy it was a moment ago was the doing of somebody who has left
    if _exceeds(device.utilization_percent, _IDLE_PERCENT):
        return reasons.over(ReasonKind.TOO_BUSY, device.utilization_percent, _IDLE_PERCENT, device.id)
    return None


def _free(device: Device, promises: Sequence[_Promise]) -> float | None:
    capacity = _capacity(device)
    if capacity is None:
        return None
    return capacity - _foreign(device, promises) - sum(_charge(promise, capacity) for promise in promises)


def _foreign(device: Device, promises: Sequence[_Promise]) -> float:
    """What strangers hold: all that is used, less what leases were measured to use or may use unseen."""
    capacity = _capacity(device) or 0.0
    hidden = [promise for promise in promises if promise.measured_mb is None and not promise.is_kept]
    seen = sum(promise.measured_mb or 0.0 for promise in promises)
    return max(0.0, (device.memory_used_mb or 0.0) - seen - sum(_charge(promise, capacity) for promise in hidden))


def _charge(promise: _Promise, capacity: float) -> float:
    reserved = promise.share.memory_mb
    if promise.share.is_exclusive or reserved is None:
        reserved = capacity
    return max(reserved, promise.measured_mb or 0.0)


def _capacity(device: Device) -> float | None:
    """Used and free together: a driver keeps a part of the total for itself."""
    if device.memory_used_mb is not None and device.memory_free_mb is not None:
        return device.memory_used_mb + device.memory_free_mb
    return device.memory_total_mb


def _exceeds(value: float | None, bound: float | None) -> bool:
    return value is not None and bound is not None and value > bound
