"""Choose among devices that all fit a need: by slow-down, links and memory; and the best-linked sets of several
devices.

A job on one device goes where it slows others least, then to the device with the least free memory, then where it
breaks the least of the sets of linked devices that are idle. A job on several gets the set with the strongest weakest
link.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from msgspec import Struct

from gpuyard.model.lease import Need
from gpuyard.model.machine_snapshot import Device
from gpuyard.model.topology import Topology
from gpuyard.model.units import format_count
from gpuyard.policy.device_state import LAST_CHOICE_PERCENT, DeviceState
from gpuyard.policy.numbers import ALIKE_MB, COMFORTABLE_PERCENT, MOST_SETS, UNKNOWN_PERCENT
from gpuyard.policy.wait_reasons import REMEDIES, Reason, ReasonKind

# The greedy search starts from at most this many devices.
_MOST_STARTS = 64

Score: TypeAlias = tuple[int, int]


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
    """Return the best set of candidates, which are in order of preference; None if no set meets the conditions.
    `idle` are the devices that other jobs could still get as a set."""
    groups = topology.node_groups(candidates) if wanted.is_on_one_node else [list(candidates)]
    found = [_best_in_group(topology, group, wanted, idle) for group in groups if len(group) >= wanted.count]
    sets = [each for each in found if each is not None]
    places = {device_id: place for place, device_id in enumerate(candidates)}
    return min(sets, key=lambda each: _preference(topology, each, idle, places), default=None)


def score(topology: Topology, devices: Sequence[str]) -> Score:
    """Return the strength of the weakest link in the set, and the sum of all."""
    links = [topology.strength(one, other) for place, one in enumerate(devices) for other in devices[:place]]
    return min(links, default=0), sum(links)


def broken(topology: Topology, devices: Collection[str], idle: Collection[str]) -> int:
    """Return the strength of the links between the set's idle devices and other idle devices."""
    rest = [device_id for device_id in idle if device_id not in devices]
    return sum(topology.strength(one, other) for one in devices if one in idle for other in rest)


def is_joined(topology: Topology, devices: Sequence[str]) -> bool:
    return len(topology.joined_groups(devices)) == 1


def _preference(
    topology: Topology, devices: tuple[str, ...], idle: Collection[str], places: dict[str, int]
) -> tuple[int, int, int, list[int]]:
    weakest, total = score(topology, devices)
    return -weakest, -total, broken(topology, devices, idle), sorted(map(places.__getitem__, devices))


def _best_in_group(
    topology: Topology, candidates: list[str], wanted: SetConditions, idle: Collection[str]
) -> tuple[str, ...] | None:
    if wanted.is_linked:
        groups = [each for each in topology.joined_groups(candidates) if len(each) >= wanted.count]
        candidates = [each for each in candidates if any(each in group for group in groups)]
    if len(candidates) < wanted.count:
        return None
    alike = _interchangeable(topology, candidates, idle)
    if _count_sets(alike, wanted.count) > MOST_SETS:
        return _grow(topology, candidates, wanted, idle)
    return _Search(topology, alike, candidates, wanted, idle).best()


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


class _Search:
    """All sets of a size, as numbers of devices from each group of interchangeable ones."""

    def __init__(
        self,
        topology: Topology,
        alike: list[list[str]],
        candidates: Sequence[str],
        wanted: SetConditions,
        idle: Collection[str],
    ) -> None:
        self._topology, self._alike, self._wanted, self._idle = topology, alike, wanted, idle
        self._places = {device_id: place for place, device_id in enumerate(candidates)}
        self._left = [sum(map(len, alike[place:])) for place in range(len(alike) + 1)]
        self._best: tuple[str, ...] | None = None
        self._best_score: Score = (-1, -1)
        self._best_rest: tuple[int, list[int]] = (0, [])

    def best(self) -> tuple[str, ...] | None:
        self._extend(0, (), None, 0)
        return self._best

    def _extend(self, place: int, chosen: tuple[str, ...], weakest: int | None, total: int) -> None:
        missing = self._wanted.count - len(chosen)
        if not missing:
            self._take(chosen, (weakest or 0, total))
            return
        if missing > self._left[place] or (weakest is not None and weakest < self._best_score[0]):
            return
        group = self._alike[place]
        longer, least, more = chosen, weakest, total
        steps = [(longer, least, more)]
        for device_id in group[:missing]:
            strengths = [self._topology.strength(device_id, each) for each in longer]
            if strengths:
                least = min(strengths) if least is None else min(least, *strengths)
            longer, more = (*longer, device_id), more + sum(strengths)
            steps.append((longer, least, more))
        # The most of a group first: good sets are found early, and the search ends sooner.
        for step in reversed(steps):
            self._extend(place + 1, *step)

    def _take(self, chosen: tuple[str, ...], found: Score) -> None:
        if found < self._best_score:
            return
        rest = broken(self._topology, chosen, self._idle), sorted(map(self._places.__getitem__, chosen))
        if self._best is not None and found == self._best_score and rest >= self._best_rest:
            return
        if not self._wanted.is_linked or is_joined(self._topology, chosen):
            self._best, self._best_score, self._best_rest = chosen, found, rest


def _grow(
    topology: Topology, candidates: Sequence[str], wanted: SetConditions, idle: Collection[str]
) -> tuple[str, ...] | None:
    """Return the best of the sets that grow from each device by its best-linked neighbour."""
    places = {device_id: place for place, device_id in enumerate(candidates)}
    starts = candidates[:_MOST_STARTS]
    sets = [each for start in starts if (each := _grow_from(topology, start, candidates, wanted)) is not None]
    return min(sets, key=lambda each: _preference(topology, each, idle, places), default=None)


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


def earliest_set(
    topology: Topology, available: Iterator[tuple[float, str]], wanted: SetConditions
) -> list[tuple[float, str]]:
    """Return the set that meets the conditions and is complete first, each device with its time; empty if there is
    none. `available` are devices in the order in which they become available."""
    found: list[tuple[float, str]] = []
    for each in available:
        found.append(each)
        chosen = best_set(topology, [device_id for _, device_id in found], wanted)
        if chosen is not None:
            return [each for each in found if each[1] in chosen]
    return []


def sets_text(topology: Topology, device_ids: Sequence[str], labels: Mapping[str, str], wanted: SetConditions) -> str:
    """Return which of these devices form sets that meet the conditions, of any size from 2; empty if none do."""
    groups = topology.node_groups(device_ids) if wanted.is_on_one_node else [list(device_ids)]
    if wanted.is_linked:
        groups = [joined for group in groups for joined in topology.joined_groups(group)]
    texts = [", ".join(labels.get(each, each) for each in group) for group in groups if len(group) > 1]
    return "; ".join(f"GPU {text}" for text in texts)


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
