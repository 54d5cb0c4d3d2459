"""Choose among devices that all fit a need: by slow-down, links and memory, in this order for several devices.

A job on one device goes where it slows others least, then to the device with the least free memory; among those with up
to 1 GB more, to the one that breaks the least of the sets of linked devices that are idle (`linked_sets`). A job on
several devices gets the best-linked set among those where it slows others least: free memory that is left over counts
only between sets that are linked alike. On a machine whose links are unknown, links decide nothing.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_memory import LAST_CHOICE_PERCENT, DeviceState
from gpuyard.core.scheduling.linked_sets import SetConditions, best_set, broken, earliest_set, sets_text
from gpuyard.core.scheduling.numbers import ALIKE_MB, COMFORTABLE_PERCENT, UNKNOWN_PERCENT
from gpuyard.core.scheduling.wait_reasons import REMEDIES, Reason, ReasonKind
from gpuyard.core.snapshot import Device
from gpuyard.core.topology import Topology
from gpuyard.core.units import format_count

_ROUNDING = 1e-6


def conditions_of(need: Need) -> SetConditions:
    """Return what has to be true of the need's devices together. A resumed job gets the devices that it had."""
    is_free = need.is_resumed or need.devices < 2
    return SetConditions(
        count=need.devices,
        is_linked=need.is_linked and not is_free,
        is_on_one_node=need.is_on_one_node and not is_free,
    )


class DeviceChoice:
    """The links of a machine's devices. `closed` are devices on which nothing new starts (`closed_devices`)."""

    def __init__(self, topology: Topology, closed: Collection[str] = ()) -> None:
        self._topology = topology
        self._closed = closed

    def choose(
        self, need: Need, fitting: Sequence[DeviceState], states: Mapping[str, DeviceState]
    ) -> Sequence[DeviceState]:
        """Return the devices that the need gets, all of one vendor; none if they are too few, or not linked as they
        have to be. `states` are all devices."""
        ordered = sorted(fitting, key=lambda state: placement_cost(need, state))
        for vendor in dict.fromkeys(state.device.vendor for state in ordered):
            group = [state for state in ordered if state.device.vendor is vendor]
            chosen = self._choose(need, group, states) if len(group) >= need.devices else ()
            if chosen:
                return chosen
        return ()

    def loss(self, states: Mapping[str, DeviceState]) -> Callable[[DeviceState], int] | None:
        """Return a function that says how much a job on one device breaks there. None where no links are known: then
        free memory alone decides."""
        if not self._topology.is_known:
            return None
        idle = self._idle(states)
        return lambda state: broken(self._topology, (state.device.id,), idle)

    def serving(self, need: Need, devices: Sequence[Device]) -> Collection[str]:
        """Return the ids of those devices that the need could get; of devices that have to be linked only the best set,
        as the others are left to requests behind."""
        ids, wanted = [device.id for device in devices], conditions_of(need)
        return (best_set(self._topology, ids, wanted) or ()) if wanted.are_any else ids

    def first(self, need: Need, available: Iterator[tuple[float, str]]) -> list[tuple[float, str]]:
        """Return the devices that the need could get first, each with the time. `available` is in order of time."""
        wanted = conditions_of(need)
        if wanted.are_any:
            return earliest_set(self._topology, available, wanted)
        return list(islice(available, need.devices))

    def refusals(self, need: Need, available: Sequence[str], labels: Mapping[str, str]) -> Iterator[Reason]:
        """Yield the reason if the available devices are too few, or if no set of them is linked as it has to be."""
        wanted = conditions_of(need)
        linked = f", {wanted}" if wanted.are_any else ""
        counted = format_count(len(available), "GPU") if available else "no GPU"
        if len(available) < wanted.count:
            yield Reason(ReasonKind.TOO_FEW, f"{counted} available now ({wanted.count} needed{linked})")
        elif wanted.are_any and best_set(self._topology, available, wanted) is None:
            found = sets_text(self._topology, available, labels, wanted)
            those = f"; only {found}" if found else ""
            text = f"{counted} available now, but not {wanted.count} that are {wanted}{those}"
            yield Reason(ReasonKind.NOT_LINKED, text, remedy=REMEDIES["not-linked"])

    def _choose(
        self, need: Need, ordered: Sequence[DeviceState], states: Mapping[str, DeviceState]
    ) -> Sequence[DeviceState]:
        wanted, loss = conditions_of(need), self.loss(states)
        if loss is None:
            return () if wanted.are_any else ordered[: need.devices]
        slowdowns = {state.device.id: placement_cost(need, state)[0] for state in ordered}
        for most in sorted(set(slowdowns.values())):
            allowed = [state for state in ordered if slowdowns[state.device.id] <= most]
            if need.devices == 1:
                return [min(_as_full_as(allowed[0], allowed), key=loss)]
            found = best_set(self._topology, [state.device.id for state in allowed], wanted, self._idle(states))
            if found is not None:
                return [state for state in allowed if state.device.id in found]
        return ()

    def _idle(self, states: Mapping[str, DeviceState]) -> set[str]:
        """Return the devices that a job could get as a whole."""
        idle = (each.device for each in states.values() if not each.promises)
        return {device.id for device in idle if device.healthy and device.id not in self._closed}


def _as_full_as(fullest: DeviceState, states: Iterable[DeviceState]) -> list[DeviceState]:
    """Return the states that have no less free memory than the fullest, and hardly more."""
    least = math.inf if fullest.free_mb is None else fullest.free_mb
    free = ((state, math.inf if state.free_mb is None else state.free_mb) for state in states)
    return [state for state, free_mb in free if least <= free_mb <= least + ALIKE_MB]


def placement_cost(need: Need, state: DeviceState) -> tuple[float, float, int, str]:
    """Return a sort key: how much the job would slow others there, then how much memory would be left over."""
    crowding = state.expected_percent + _load(need) - COMFORTABLE_PERCENT if state.is_loaded else 0.0
    last = LAST_CHOICE_PERCENT if state.device.is_last_choice else 0.0
    return (
        last + (crowding if crowding > _ROUNDING else 0.0),
        state.free_mb if state.free_mb is not None else math.inf,
        state.device.index or 0,
        state.device.id,
    )


def _load(need: Need) -> float:
    return UNKNOWN_PERCENT if need.load_percent is None else need.load_percent
