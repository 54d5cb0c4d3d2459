"""Place work on devices: requests ahead in the queue come first, and a need gets all of its devices or none.

After PATIENCE_S a request in the ledger's queue reserves every device that it could use once leases end. A request that
would not fit even then reserves none.
"""

import copy
import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.lease import Claim, Holder, Need, Share, Ticket
from gpuyard.model.machine_snapshot import Device
from gpuyard.policy import wait_reasons
from gpuyard.policy.device_state import DeviceState, PromisedShare, claimed_share, has_free_part, lease_ids, share_of
from gpuyard.policy.foreign_load import NO_FOREIGN_LOAD
from gpuyard.policy.host_room import HostPlacement
from gpuyard.policy.linked_sets import DeviceChoice
from gpuyard.policy.machine import Machine, Packing, check_suitable, kind_of
from gpuyard.policy.numbers import PATIENCE_S
from gpuyard.policy.rules import RULES, DeviceRule, HostRoom, Rule, StartRequest, Together, first_refusal
from gpuyard.policy.sharing import depth_limit
from gpuyard.policy.wait_reasons import Reason, ReasonKind

if TYPE_CHECKING:
    from gpuyard.policy.running_counts import StartedSoFar

LeaseEnds = Mapping[str, float]  # a lease without an end may end at any moment
Available = tuple[float, str]  # a device, and when it becomes available


class PlacementState:
    """All devices with their leases, planned claims and reservations. A planner adds each claim before the next."""

    def __init__(self, machine: Machine, started: "StartedSoFar | None" = None, rules: Sequence[Rule] = RULES) -> None:
        """`started` has the jobs that run and the starts of the plan; None: no plan is made."""
        self._started = started
        self.machine = machine
        self._rules = [each for each in rules if isinstance(each, DeviceRule)]
        self._host_rules = [each for each in rules if isinstance(each, HostRoom)]
        self._set_rules = [each for each in rules if isinstance(each, Together)]
        self.links = DeviceChoice(machine.snapshot.topology, machine.closed)
        self._with_capacity: str | None = ""
        self._available: tuple[Need | None, list[str]] = None, []  # of the last explanation
        self._suitable: dict[tuple[object, ...], list[str]] = {}  # devices, by the kind of need
        self._packings: dict[tuple[object, ...], Packing] = {}  # by the kind of need

    @cached_property
    def states(self) -> dict[str, DeviceState]:
        """All devices with the leases on them, unhealthy ones included, as these have to be explained too."""
        machine = self.machine
        promises: dict[str, list[PromisedShare]] = {}
        for lease in machine.leases:
            load = machine.lease_loads.get(lease.id)
            for share in lease.shares:
                known = share if load is None or share.load_percent is not None else replace(share, load_percent=load)
                measured_mb = machine.measured.get((lease.id, share.device_id))
                promise = PromisedShare(share=known, holder=lease.holder, measured_mb=measured_mb, lease_id=lease.id)
                promises.setdefault(share.device_id, []).append(promise)
        return {
            device.id: DeviceState(
                device,
                promises.get(device.id, []),
                machine.loads.get(device.id),
                machine.foreign.get(device.id, NO_FOREIGN_LOAD),
                machine.packing.sureness,
            )
            for device in machine.snapshot.unsplit_devices()
        }

    @cached_property
    def host(self) -> HostPlacement:
        return HostPlacement(self.machine.snapshot.host, self.machine.host, self.machine.leases)

    @property
    def started(self) -> "StartedSoFar":
        assert self._started is not None, "rules about jobs are asked for plans only"
        return self._started

    def copy(self) -> "PlacementState":
        """Return a placement to which the head's reservation is added."""
        other = copy.copy(self)
        other.states, other.host = dict(self.states), copy.copy(self.host)
        return other

    def has_capacity(self) -> bool:
        """Return whether a device is neither held exclusively nor full. If none is, no job with devices can start."""
        # Devices only fill, so the one that had capacity last time is asked first.
        known = self._with_capacity
        if known is not None and not (known and has_free_part(self.states[known])):
            states = self.states.values()
            self._with_capacity = next((state.device.id for state in states if has_free_part(state)), None)
        return self._with_capacity is not None

    def find_claim(self, need: Need) -> Claim | None:
        if any(rule.blocks(need, self) for rule in self._host_rules):
            return None
        if not need.devices:
            return Claim(shares=(), host=need.host)
        fitting = self.links.choose(need, self._fitting(need), self.states)
        if not fitting:
            return None
        chosen = sorted(fitting, key=lambda state: (state.device.index or 0, state.device.id))
        return Claim(shares=tuple(claimed_share(need, state) for state in chosen), host=need.host)

    def explain(self, need: Need) -> Iterator[Reason]:
        request = StartRequest(need=need)
        if (host := first_refusal(self._host_rules, request, None, self)) is not None:
            yield host
        if not need.devices:
            return
        refused = [
            (device_id, first_refusal(self._rules, request, each, self)) for device_id, each in self.states.items()
        ]
        # To write the reasons of a thousand devices would take longer than to decide.
        yield from islice((reason for _, reason in refused if reason is not None), 64)
        self._available = need, [device_id for device_id, reason in refused if reason is None]
        if not any(self.suitable_devices(need)):
            silent = (each for each in self.machine.snapshot.silent if need.vendor in (None, each.vendor))
            yield from (Reason(ReasonKind.UNHEALTHY, each.sentence, remedy=each.hint or "") for each in silent)
        if (too_few := first_refusal(self._set_rules, request, None, self)) is not None:
            yield too_few

    def available(self, need: Need) -> list[str]:
        known, found = self._available
        return found if known is need else [each for each, state in self.states.items() if self.fits(need, state)]

    def add_claim(self, claim: Claim, holder: Holder, lease_id: str | None = None) -> None:
        """Add the shares of a start, which has not used any memory yet. `lease_id` stands for its future lease."""
        for share in claim.shares:
            self._add(PromisedShare(share=share, holder=holder, measured_mb=0.0, lease_id=lease_id))
        self.host.add_claim(claim, holder, lease_id)

    def reserve_host(self, need: Need, holder: Holder, older: Collection[str] | None = None) -> bool:
        """Reserve the RAM and CPUs of a request that waits for them: now, or once the leases `older` have ended. Return
        False, and reserve none, if it waits for something else, or would not fit even after all leases have ended."""
        if not self.host.lacks(need) or self.host.excludes(need):
            return False
        if len(self.fitting_without_leases(need)) < need.devices:
            return False
        self.host.reserve(need.host, holder, older)
        return True

    def reserve_for_ticket(self, ticket: Ticket) -> None:
        """Reserve for a request in the ledger's queue what no request behind it may take."""
        need, holder = ticket.need, ticket.holder
        claim = self.find_claim(need)
        if claim is not None:
            self._reserve(claim.shares, holder)
            self.host.reserve(claim.host, holder)
            return
        # It needs more than is free: of devices that fit now, or, after a while, of those that will.
        has_waited = self.machine.now - ticket.since > PATIENCE_S
        found = [state.device for state in self.suitable_devices(need) if self.fits(need, state)]
        if found or has_waited:
            later = self.fitting_without_leases(need)
            serving = self.links.serving(need, later)
            if len(serving) >= need.devices and not self.host.excludes(need):
                reserved = later if has_waited else found
                self._reserve((share_of(need, each) for each in reserved if each.id in serving), holder)
        if has_waited:
            self.reserve_host(need, holder)

    def reserve(self, need: Need, holder: Holder) -> bool:
        """Reserve for the head what would serve it once leases end. Return False, and reserve none, if none would."""
        if self.host.excludes(need):
            return False
        chosen = sorted(self.links.serving(need, self.fitting_without_leases(need)))
        if len(chosen) < need.devices:
            return False
        # A job that joined a device with a load limit would keep it loaded.
        is_exclusive = need.is_exclusive or need.limits_device_load
        shares = (share_of(need, self.states[device_id].device) for device_id in chosen)
        self._reserve((replace(share, is_exclusive=is_exclusive) for share in shares), holder)
        return True

    def first_available(self, need: Need, ends: LeaseEnds) -> list[Available]:
        """Return the first devices that will have capacity for the need, each with the time: as many as it needs."""
        return self.links.first(need, self._in_order_of_time(need, ends))

    def _in_order_of_time(self, need: Need, ends: LeaseEnds) -> Iterator[Available]:
        """Yield devices as they become available. One is examined when its first lease ends before any known one."""
        now, fitting = self.machine.now, {state.device.id for state in self._fitting(need)}
        queue: list[tuple[float, str, DeviceState | None]] = [(now, device_id, None) for device_id in fitting]
        for state in self.suitable_devices(need):
            if state.device.id not in fitting and (leases := lease_ids(state)):
                first = min(ends.get(each, now) for each in leases)
                queue.append((max(now, first), state.device.id, state))
        heapq.heapify(queue)
        while queue:
            at, device_id, unexamined = heapq.heappop(queue)
            if unexamined is None:
                yield at, device_id
                continue
            gone: set[str] = set()
            for lease_id in sorted(lease_ids(unexamined), key=lambda each: ends.get(each, now)):
                gone.add(lease_id)
                if self.fits(need, unexamined.without(frozenset(gone))):
                    heapq.heappush(queue, (max(now, ends.get(lease_id, now)), device_id, None))
                    break

    def fits(self, need: Need, state: DeviceState) -> bool:
        for rule in self._rules:  # noqa: SIM110 - a generator takes twice as long, for each job and device
            if rule.blocks(need, state, self):
                return False
        return True

    def suitable_devices(self, need: Need) -> Iterator[DeviceState]:
        """Yield the devices that the need allows and that are not closed, busy or not."""
        kind = kind_of(need)
        found = self._suitable.get(kind)
        if found is None:
            devices = [state.device for state in self.states.values() if check_suitable(need, state.device) is None]
            found = [device.id for device in devices if not (self.machine.closed and self.closed(need, device))]
            self._suitable[kind] = found
        return map(self.states.__getitem__, found)

    def closed(self, need: Need, device: Device) -> Reason | None:
        closed = self.machine.closed.get(device.id)
        return None if need.is_resumed and closed is not None and closed.kind is not ReasonKind.MEMORY_GUARD else closed

    def _fitting(self, need: Need) -> list[DeviceState]:
        return [state for state in self.states.values() if self.fits(need, state)]

    def fitting_without_leases(self, need: Need) -> list[Device]:
        """Return the devices that would fit after all leases have ended."""
        return [state.device for state in self.states.values() if self.fits(need, state.without())]

    def _reserve(self, shares: Iterable[Share], holder: Holder) -> None:
        for share in shares:
            self._add(PromisedShare(share=share, holder=holder, is_reservation=True))

    def _add(self, promise: PromisedShare) -> None:
        device_id = promise.share.device_id
        self.states[device_id] = self.states[device_id].with_promise(promise)

    def packing(self, need: Need) -> Packing:
        """Return the limits of sharing for the need: only devices that suit it count for how deep they are shared."""
        usual = self.machine.packing
        if usual.depth is None or not need.devices or need.is_exclusive:
            return usual
        kind = kind_of(need)
        found = self._packings.get(kind)
        if found is None:
            count = sum(state.device.healthy for state in self.suitable_devices(need))
            found = (
                usual if count == usual.depth.devices else replace(usual, depth=depth_limit(usual.depth.jobs, count))
            )
            self._packings[kind] = found
        return found


def in_queue_order(tickets: Sequence[Ticket]) -> list[Ticket]:
    """Return the tickets by priority, the highest first, then by age, the oldest first."""
    return sorted(tickets, key=lambda ticket: (-ticket.priority, ticket.since, ticket.id))


class PlacementChoice(Struct, frozen=True, kw_only=True):
    claim: Claim | None
    reasons: tuple[Reason, ...] = ()


def choose(need: Need, machine: Machine) -> PlacementChoice:
    """Return a claim on the best devices for `need`, or the reasons why none is possible now."""
    placement = PlacementState(machine)
    claim = placement.find_claim(need)
    for ticket in machine.ahead:
        if claim is None:
            break  # more reservations would not change that
        placement.reserve_for_ticket(ticket)
        claim = placement.find_claim(need)
    if claim is None:
        return PlacementChoice(claim=None, reasons=tuple(placement.explain(need)))
    # Reservations alone do not rule out that the claim blocks a request ahead: beside it, those may be placed on other
    # devices than reserved, and then block each other.
    before, after = PlacementState(machine), PlacementState(machine)
    after.add_claim(claim, Holder(uid=0, user="", pid=0))
    for ticket in machine.ahead:
        without_claim, with_claim = before.find_claim(ticket.need), after.find_claim(ticket.need)
        if without_claim is None:
            break
        if with_claim is None:
            places = tuple(share.device_id for share in claim.shares) or (None,)
            reasons = (wait_reasons.awaited(device_id, (ticket.holder,)) for device_id in places)
            return PlacementChoice(claim=None, reasons=tuple(reasons))
        before.add_claim(without_claim, ticket.holder)
        after.add_claim(with_claim, ticket.holder)
    return PlacementChoice(claim=claim)
