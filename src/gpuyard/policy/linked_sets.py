"""Choose among devices that all fit a need. A job on one device goes where it slows others least, then to the device
with the least free memory, then where it breaks the least of the sets of linked devices that are idle. A job on several
gets the set with the strongest weakest link.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from msgspec import Struct

from gpuyard.model.lease import Need
from gpuyard.model.machine_snapshot import Device
from gpuyard.model.topology import Topology
from gpuyard.model.units import format_count
from gpuyard.policy.device_state import DeviceState
from gpuyard.policy.numbers import ALIKE_MB, COMFORTABLE_PERCENT, MOST_SETS, UNKNOWN_PERCENT
from gpuyard.policy.wait_reasons import REMEDIES, Reason, ReasonKind


class SetConditions(Struct, frozen=True, kw_only=True):
    """How many devices, and what has to be true of them together."""

    count: int
    is_linked: bool = False
    is_on_one_node: bool = False

    @property
    def are_any(self) -> bool:
        return self.is_linked or self.is_on_one_node

    def __str__(self) -> str:
        texts = ("joined by NVLink or XGMI" * self.is_linked, "on one NUMA node" * self.is_on_one_node)
        return " and ".join(filter(None, texts))


def best_set(
    topology: Topology, candidates: Sequence[str], wanted: SetConditions, idle: Collection[str] = ()
) -> tuple[str, ...] | None:
    """Return the best set of candidates, in order of preference, or None. `idle`: what others could still get."""
    groups = topology.node_groups(candidates) if wanted.is_on_one_node else [list(candidates)]
    if wanted.is_linked:
        groups = [joined for group in groups for joined in topology.joined_groups(group)]
    places = {device_id: place for place, device_id in enumerate(candidates)}

    def preference(devices: tuple[str, ...]) -> tuple[int, int, int, list[int]]:
        weakest, total = score(topology, devices)
        return -weakest, -total, broken(topology, devices, idle), sorted(map(places.__getitem__, devices))

    large = (sorted(each, key=places.__getitem__) for each in groups if len(each) >= wanted.count)
    return min((each for group in large for each in _sets(topology, group, wanted, idle)), key=preference, default=None)


def score(topology: Topology, devices: Sequence[str]) -> tuple[int, int]:
    """Return the strength of the weakest link in the set, and the sum of all."""
    links = [topology.strength(one, other) for place, one in enumerate(devices) for other in devices[:place]]
    return min(links, default=0), sum(links)


def broken(topology: Topology, devices: Collection[str], idle: Collection[str]) -> int:
    """Return the strength of the links between the set's idle devices and other idle devices."""
    rest = [device_id for device_id in idle if device_id not in devices]
    return sum(topology.strength(one, other) for one in devices if one in idle for other in rest)


def is_joined(topology: Topology, devices: Sequence[str]) -> bool:
    return len(topology.joined_groups(devices)) == 1


def _sets(
    topology: Topology, candidates: Sequence[str], wanted: SetConditions, idle: Collection[str]
) -> Iterator[tuple[str, ...]]:
    """Yield the sets of candidates that differ by more than interchangeable devices; if these are too many, those that
    grow from each device by its best-linked neighbour."""
    alike = _interchangeable(topology, candidates, idle)
    if _count_sets(alike, wanted.count) > MOST_SETS:
        grown = (_grow_from(topology, start, candidates, wanted) for start in candidates[:64])
        yield from (each for each in grown if each is not None)
        return
    yield from (each for each in _draws(alike, wanted.count) if not wanted.is_linked or is_joined(topology, each))


def _draws(alike: Sequence[Sequence[str]], count: int) -> Iterator[tuple[str, ...]]:
    """Yield all ways to take so many devices, of each group the first ones."""
    if not count:
        yield ()
    elif count <= sum(map(len, alike)):
        group, *rest = alike
        for number in range(min(len(group), count) + 1):
            yield from ((*group[:number], *others) for others in _draws(rest, count - number))


def _interchangeable(topology: Topology, candidates: Sequence[str], idle: Collection[str]) -> list[list[str]]:
    """Return the candidates in groups of devices whose links to all others are alike."""
    universe = list(dict.fromkeys((*candidates, *idle)))
    groups: list[list[str]] = []
    for device_id in candidates:
        for group in groups:
            first = group[0]
            if (first in idle) == (device_id in idle) and all(
                topology.strength(first, each) == topology.strength(device_id, each)
                for each in universe
                if each not in (first, device_id)
            ):
                group.append(device_id)
                break
        else:
            groups.append([device_id])
    return groups


def _count_sets(alike: Sequence[Sequence[str]], count: int) -> int:
    """Return how many sets differ by more than interchangeable devices."""
    ways = [1] + [0] * count
    for group in alike:
        ways = [sum(ways[max(0, size - len(group)) : size + 1]) for size in range(count + 1)]
    return ways[count]


def _grow_from(
    topology: Topology, start: str, candidates: Sequence[str], wanted: SetConditions
) -> tuple[str, ...] | None:
    chosen = [start]
    while len(chosen) < wanted.count:
        ranked = [
            (min(strengths), sum(strengths), -place, each)
            for place, each in enumerate(candidates)
            if each not in chosen
            if (strengths := [topology.strength(each, other) for other in chosen])
            if not wanted.is_linked or any(topology.kind(each, other).is_direct for other in chosen)
        ]
        if not ranked:
            return None
        chosen.append(max(ranked)[3])
    return tuple(chosen)


def sets_text(topology: Topology, device_ids: Sequence[str], labels: Mapping[str, str], wanted: SetConditions) -> str:
    """Return which of these devices form sets that meet the conditions, of any size from 2; empty if none do."""
    groups = topology.node_groups(device_ids) if wanted.is_on_one_node else [list(device_ids)]
    if wanted.is_linked:
        groups = [joined for group in groups for joined in topology.joined_groups(group)]
    texts = [", ".join(labels.get(each, each) for each in group) for group in groups if len(group) > 1]
    return "; ".join(f"GPU {text}" for text in texts)


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
        """Return the devices that the need gets, of one vendor; none if too few, or not linked as they have to be."""
        ordered = sorted(fitting, key=lambda state: placement_cost(need, state))
        for vendor in dict.fromkeys(state.device.vendor for state in ordered):
            group = [state for state in ordered if state.device.vendor is vendor]
            chosen = self._choose(need, group, states) if len(group) >= need.devices else ()
            if chosen:
                return chosen
        return ()

    def serving(self, need: Need, devices: Sequence[Device]) -> Collection[str]:
        """Return the devices that the need could get: of linked ones the best set, to leave the others to requests
        behind."""
        ids, wanted = [device.id for device in devices], conditions_of(need)
        return (best_set(self._topology, ids, wanted) or ()) if wanted.are_any else ids

    def first(self, need: Need, available: Iterator[tuple[float, str]]) -> list[tuple[float, str]]:
        """Return the devices that the need could get first, with times; linked ones as a set."""
        wanted = conditions_of(need)
        if not wanted.are_any:
            return list(islice(available, need.devices))
        found: list[tuple[float, str]] = []
        for each in available:
            found.append(each)
            chosen = best_set(self._topology, [device_id for _, device_id in found], wanted)
            if chosen is not None:
                return [each for each in found if each[1] in chosen]
        return []

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
        wanted, topology = conditions_of(need), self._topology
        if not topology.is_known:  # free memory alone decides
            return () if wanted.are_any else ordered[: need.devices]
        free_devices = (each.device for each in states.values() if not each.promises)
        idle = {device.id for device in free_devices if device.healthy and device.id not in self._closed}
        slowdowns = {state.device.id: placement_cost(need, state)[0] for state in ordered}
        for most in sorted(set(slowdowns.values())):
            allowed = [state for state in ordered if slowdowns[state.device.id] <= most]
            if need.devices == 1:  # of those with hardly more free memory than the fullest, where it breaks least
                free_mb = [math.inf if state.free_mb is None else state.free_mb for state in allowed]
                most_mb = free_mb[0] + ALIKE_MB
                alike = [each for each, mb in zip(allowed, free_mb, strict=True) if free_mb[0] <= mb <= most_mb]
                return [min(alike, key=lambda state: broken(topology, (state.device.id,), idle))]
            found = best_set(topology, [state.device.id for state in allowed], wanted, idle)
            if found is not None:
                return [state for state in allowed if state.device.id in found]
        return ()


def placement_cost(need: Need, state: DeviceState) -> tuple[float, float, int, str]:
    """Return a sort key: how much the job would slow others there, then how much memory would be left over."""
    load = UNKNOWN_PERCENT if need.load_percent is None else need.load_percent
    crowding = state.expected_percent + load - COMFORTABLE_PERCENT if state.is_loaded else 0.0
    last = 1e9 if state.device.is_last_choice else 0.0  # behind any load that jobs can cause
    return (
        last + (crowding if crowding > 1e-6 else 0.0),
        state.free_mb if state.free_mb is not None else math.inf,
        state.device.index or 0,
        state.device.id,
    )
