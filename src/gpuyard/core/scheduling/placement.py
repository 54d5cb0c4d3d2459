"""Where a piece of work may go: those who came first first, all devices or none. `room.py` says how much room there is.

Those ahead in the line are given theirs first, on paper: what they could have now, or, where that is not all they need,
every device that would serve them. Nobody behind takes that away. One who has waited long is kept every device it could
use once leases end, so that a stream of small work does not hold up a large one for ever. But one whom the end of all
leases would not help (a stranger is in its way, or the machine is too busy for it) holds up nobody.

Of the devices that fit, one goes where it slows others least, and there where it leaves the least room over, so that
large rooms stay for large work.
"""

import copy
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.lease import Claim, Holder, Lease, Need, Share, Ticket
from gpuyard.core.scheduling import wait_reasons as reasons
from gpuyard.core.scheduling.device_fit import Packing, crowded, host_refusals, reason_for, taken, unsound, unsuitable
from gpuyard.core.scheduling.device_memory import DeviceRoom, PromisedShare
from gpuyard.core.scheduling.foreign_load import NO_FOREIGN_LOAD, ForeignLoad
from gpuyard.core.scheduling.shared_devices import SharedDevices, unfitness
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.snapshot import Device, Snapshot

PATIENCE_S = 60.0
_SOMEBODY = Holder(uid=0, user="", pid=0)
# Nobody reads more than this many devices' reasons, and to write a thousand takes longer than to decide.
_TOLD_DEVICES = 64


class PlacementView(Struct, frozen=True, kw_only=True):
    """`measured` is the memory that a lease's processes hold on a device, by lease id and device id; `loads` is how
    busy each device was seen to be, smoothed, and `foreign` how busy processes without a lease keep it; those ahead are
    in the order of the line."""

    now: float
    snapshot: Snapshot
    leases: tuple[Lease, ...] = ()
    measured: Mapping[tuple[str, str], float | None] = {}
    loads: Mapping[str, float | None] = {}
    foreign: Mapping[str, ForeignLoad] = {}
    packing: Packing = Packing()
    ahead: tuple[Ticket, ...] = ()


class PlacementChoice(Struct, frozen=True, kw_only=True):
    """A claim, or the reasons why there is none."""

    claim: Claim | None
    reasons: tuple[Reason, ...] = ()


def choose(need: Need, view: PlacementView) -> PlacementChoice:
    """The devices that suit `need` best, all of them or none."""
    board = PlacementState(view)
    choice = board.choose(need)
    for ticket in view.ahead:
        if choice.claim is None:
            break  # whoever else is ahead only takes more away
        board.keep_for(ticket)
        choice = board.choose(need)
    robbed = _robbed(choice.claim, view) if choice.claim is not None else None
    if choice.claim is None or robbed is None:
        return choice
    told = (reasons.awaited(share.device_id, (robbed,)) for share in choice.claim.shares)
    return PlacementChoice(claim=None, reasons=tuple(told))


def _robbed(claim: Claim, view: PlacementView) -> Holder | None:
    """One ahead who could have what it needs now, and could not once the claim is granted: beside it those ahead may go
    elsewhere than on paper, and so be in each other's way."""
    before, after = PlacementState(view), PlacementState(view)
    after.take(claim, _SOMEBODY)
    for ticket in view.ahead:
        could, can = before.find(ticket.need), after.find(ticket.need)
        if could is None:
            return None
        if can is None:
            return ticket.holder
        before.take(could, ticket.holder)
        after.take(can, ticket.holder)
    return None


class PlacementState:
    """Who has what, and for whom what is kept, on paper: one who plans several starts notes each before the next."""

    def __init__(self, view: PlacementView) -> None:
        self._view = view
        promises = _granted(view)
        self.rooms = {
            device.id: DeviceRoom(
                device,
                promises.get(device.id, ()),
                view.loads.get(device.id),
                view.foreign.get(device.id, NO_FOREIGN_LOAD),
            )
            for device in _whole_or_parts(view.snapshot)
        }
        # Those that could ever do for a need, whoever is on them, and of these the ones whose state allows it now; the
        # same for all that ask for the same kind.
        self._suitable: dict[tuple[object, ...], list[str]] = {}
        self._sound: dict[tuple[object, ...], list[str]] = {}
        self.shelves: dict[tuple[object, ...], SharedDevices] = {}

    def copy(self) -> "PlacementState":
        other = copy.copy(self)
        other.rooms = dict(self.rooms)
        other.shelves = {kind: shelf.copy() for kind, shelf in self.shelves.items()}
        return other

    def without(self, lease_ids: frozenset[str]) -> "PlacementState":
        """As it will be when these leases have ended."""
        other = PlacementState(self._view)
        other.rooms = {device_id: room.without(lease_ids) for device_id, room in self.rooms.items()}
        return other

    def has_room(self) -> bool:
        """Whether there is a device that nobody has alone or filled up: otherwise nothing that needs one can start."""
        return not all(room.is_alone or _is_filled(room) for room in self.rooms.values())

    def choose(self, need: Need) -> PlacementChoice:
        claim = self.find(need)
        return (
            PlacementChoice(claim=claim)
            if claim is not None
            else PlacementChoice(claim=None, reasons=tuple(self.explain(need)))
        )

    def find(self, need: Need) -> Claim | None:
        if any(host_refusals(need, self._view.snapshot.host)):
            return None
        if not need.devices:
            return Claim(shares=())
        if need.devices == 1 and not need.is_exclusive:
            best = self._shelf(need).best(need, self._view.packing)
            return None if best is None else Claim(shares=(_share_of(need, best),))
        fitting = sorted(self._fitting(need), key=lambda room: unfitness(need, room))[: need.devices]
        if len(fitting) < need.devices:
            return None
        chosen = sorted(fitting, key=lambda room: (room.device.vendor, room.device.index or 0, room.device.id))
        return Claim(shares=tuple(_share_of(need, room) for room in chosen))

    def explain(self, need: Need) -> Iterator[Reason]:
        """Why there is none."""
        yield from host_refusals(need, self._view.snapshot.host)
        fits = told = 0
        for room in self.rooms.values():
            kind = self._refusal(need, room)
            fits += kind is None
            if kind is not None and told < _TOLD_DEVICES:
                told += 1
                yield reason_for(kind, need, room, self._view.packing)
        if fits < need.devices:
            yield reasons.plain(ReasonKind.TOO_FEW, f"{fits} of {need.devices} devices are to be had now")

    def take(self, claim: Claim, holder: Holder, lease_id: str | None = None) -> None:
        """Notes a start: it has its shares, and has not used any memory yet; until it has a lease it is called so."""
        for share in claim.shares:
            self._promise(PromisedShare(share=share, holder=holder, measured_mb=0.0, lease_id=lease_id))

    def keep_for(self, ticket: Ticket) -> None:
        """Notes what nobody behind may take from one who waits in the ledger's line."""
        claim = self.find(ticket.need)
        shares = claim.shares if claim is not None else self._awaited(ticket)
        self._keep(shares, ticket.holder)

    def reserve(self, need: Need, holder: Holder, ends: Mapping[str, float] | None = None) -> bool:
        """Notes what nobody behind may take from the first in the queue: the devices that will be free for it first, if
        leases end at these times, or, where nobody says when they do, each that would serve it once leases end.

        Whether there are enough of them: one whom the end of all leases would not help is kept nothing.
        """
        if any(host_refusals(need, self._view.snapshot.host)):
            return False
        chosen = [] if ends is None else [device_id for _, device_id in self.first_free(need, ends)]
        if len(chosen) < need.devices:
            later = sorted(device.id for device in self._once_leases_end(need))
            if len(later) < need.devices:
                return False
            others = [device_id for device_id in later if device_id not in chosen]
            chosen += others if ends is None else others[: need.devices - len(chosen)]
        # Whoever joined one that bears only so much load would keep it loaded.
        is_alone = need.is_exclusive or need.bounds_load
        devices = (self.rooms[device_id].device for device_id in chosen)
        self._keep((replace(_kept_share(need, device), is_exclusive=is_alone) for device in devices), holder)
        return True

    def first_free(self, need: Need, ends: Mapping[str, float]) -> list[tuple[float, str]]:
        """As many devices as it needs, or all there are, that will have room for it first, and when, if leases end at
        these times. A lease of which nobody knows the end may end at any moment.

        The best first: a device is looked into only when its first lease's end comes before any that is sure.
        """
        now = self._view.now
        fitting = {room.device.id for room in self._fitting(need)}
        line = [(now, device_id, True) for device_id in fitting]
        taken_rooms = [room for room in self.could_do(need) if room.device.id not in fitting]
        line += [(at, room.device.id, False) for room in taken_rooms if (at := _first_end(room, ends, now)) is not None]
        heapq.heapify(line)
        found: list[tuple[float, str]] = []
        while line and len(found) < need.devices:
            at, device_id, is_sure = heapq.heappop(line)
            if is_sure:
                found.append((at, device_id))
            elif (frees_at := self._frees_at(need, self.rooms[device_id], ends)) is not None:
                heapq.heappush(line, (frees_at, device_id, True))
        return found

    def _frees_at(self, need: Need, room: DeviceRoom, ends: Mapping[str, float]) -> float | None:
        now = self._view.now
        gone: set[str] = set()
        for lease_id in sorted(_leases_on(room), key=lambda each: ends.get(each, now)):
            gone.add(lease_id)
            if self._refusal(need, room.without(frozenset(gone))) is None:
                return max(now, ends.get(lease_id, now))
        return None

    def host_refuses(self, need: Need) -> bool:
        """Whether the machine as a whole stands against it, whoever leaves."""
        return any(host_refusals(need, self._view.snapshot.host))

    def could_hold(self, need: Need, room: DeviceRoom) -> bool:
        """Whether the device, with what is on it, has room for it."""
        return self._refusal(need, room) is None

    def could_do(self, need: Need) -> Iterator[DeviceRoom]:
        kind = (need.only, need.banned, need.vendor, need.model)
        found = self._suitable.get(kind)
        if found is None:
            found = [device_id for device_id, room in self.rooms.items() if unsuitable(need, room.device) is None]
            self._suitable[kind] = found
        return map(self.rooms.__getitem__, found)

    def _fitting(self, need: Need) -> list[DeviceRoom]:
        """Those that nothing speaks against. The cheap questions come first: it is asked for every job that waits."""
        rooms, packing = self._sound_rooms(need), self._view.packing
        if need.is_exclusive:
            empty = [room for room in rooms if not room.promises]
            return empty if need.ignores_health else [room for room in empty if not crowded(need, room, packing)]
        least = -math.inf if need.memory_mb is None else need.memory_mb
        roomy = [room for room in rooms if room.free_mb is not None and room.free_mb >= least and not room.is_alone]
        return [room for room in roomy if not crowded(need, room, packing)]

    def _sound_rooms(self, need: Need) -> Iterator[DeviceRoom]:
        """Those that could do for it, are healthy, and within its bounds now."""
        kind = _kind(need)
        found = self._sound.get(kind)
        if found is None:
            found = [room.device.id for room in self.could_do(need) if unsound(need, room.device) is None]
            self._sound[kind] = found
        return map(self.rooms.__getitem__, found)

    def _shelf(self, need: Need) -> SharedDevices:
        kind = _kind(need)
        shelf = self.shelves.get(kind)
        if shelf is None:
            shelf = self.shelves[kind] = SharedDevices(self._sound_rooms(need))
        return shelf

    def _once_leases_end(self, need: Need) -> list[Device]:
        return [room.device for room in self.could_do(need) if self._refusal(need, room.without()) is None]

    def _awaited(self, ticket: Ticket) -> tuple[Share, ...]:
        """What nobody may take from one who waits for more; nothing where only strangers could help it."""
        need = ticket.need
        has_waited = self._view.now - ticket.since > PATIENCE_S
        now = [room.device for room in self.could_do(need) if self._refusal(need, room) is None]
        if not now and not has_waited:
            return ()
        later = self._once_leases_end(need)
        if len(later) < need.devices or any(host_refusals(need, self._view.snapshot.host)):
            return ()
        return tuple(_kept_share(need, device) for device in (later if has_waited else now))

    def _keep(self, shares: Iterable[Share], holder: Holder) -> None:
        for share in shares:
            self._promise(PromisedShare(share=share, holder=holder, is_kept=True))

    def _promise(self, promise: PromisedShare) -> None:
        before = self.rooms[promise.share.device_id]
        after = self.rooms[promise.share.device_id] = before.with_promise(promise)
        for shelf in self.shelves.values():
            shelf.exchange(before, after)

    def _refusal(self, need: Need, room: DeviceRoom) -> ReasonKind | None:
        """The first thing that speaks against the device."""
        kind = unsuitable(need, room.device) or taken(need, room) or unsound(need, room.device)
        if kind is not None or (need.is_exclusive and need.ignores_health):
            return kind
        # What a shared lease reserves has to be there however healthy the device is.
        return crowded(need, room, self._view.packing)


def free_memory(device: Device, view: PlacementView) -> float | None:
    """What a shared lease could still reserve on the device; `None` where its size is unknown."""
    return DeviceRoom(device, _granted(view).get(device.id, ()), None).free_mb


def in_line(tickets: Sequence[Ticket]) -> list[Ticket]:
    """The highest priority first, then whoever has waited longest."""
    return sorted(tickets, key=lambda ticket: (-ticket.priority, ticket.since, ticket.id))


def _is_filled(room: DeviceRoom) -> bool:
    return bool(room.promises) and room.free_mb is not None and room.free_mb <= 0.0


def _granted(view: PlacementView) -> dict[str, list[PromisedShare]]:
    promises: dict[str, list[PromisedShare]] = {}
    for lease in view.leases:
        for share in lease.shares:
            measured = view.measured.get((lease.id, share.device_id))
            promise = PromisedShare(share=share, holder=lease.holder, measured_mb=measured, lease_id=lease.id)
            promises.setdefault(share.device_id, []).append(promise)
    return promises


def _whole_or_parts(snapshot: Snapshot) -> tuple[Device, ...]:
    """A card that is split is used through its parts; an unhealthy one is there to be told of."""
    split = {device.parent for device in snapshot.devices}
    return tuple(device for device in snapshot.devices if device.id not in split)


def _share_of(need: Need, room: DeviceRoom) -> Share:
    memory_mb = room.free_mb if need.takes_rest and room.free_mb is not None else need.memory_mb
    share = _kept_share(replace(need, memory_mb=memory_mb), room.device)
    is_told = room.device.hides_processes and room.device.memory_used_mb is not None
    return replace(share, foreign_mb=room.foreign_mb) if is_told else share


def _kept_share(need: Need, device: Device) -> Share:
    return Share(
        device_id=device.id, memory_mb=need.memory_mb, load_percent=need.load_percent, is_exclusive=need.is_exclusive
    )


def _leases_on(room: DeviceRoom) -> set[str]:
    return {each.lease_id for each in room.promises if each.lease_id is not None}


def _first_end(room: DeviceRoom, ends: Mapping[str, float], now: float) -> float | None:
    first = min([ends.get(lease_id, now) for lease_id in _leases_on(room)], default=None)
    return None if first is None else max(now, first)


def _kind(need: Need) -> tuple[object, ...]:
    """What it asks of a device, but for room."""
    bounds = (need.max_utilization_percent, need.max_power_w, need.max_memory_used_mb)
    return (need.only, need.banned, need.vendor, need.model, need.ignores_health, *bounds)
