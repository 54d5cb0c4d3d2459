"""Choose the devices of a job on several GPUs by their links, and keep well-linked sets together.

- The score of a set is its weakest link, then the sum of its links: the slowest link limits collective operations.
- What a set breaks is the sum of the links between its idle devices and the idle devices that it leaves. Of two sets
  with the same score the one that breaks less is better, then the one earlier in the order of the candidates.
- `is_linked`: NVLink or XGMI leads from each device of the set to each other, within the set. `is_on_one_node`: all
  devices are on one known NUMA node.

The best set is found by trying all sets that differ: devices whose links are all alike are interchangeable, so 16 GPUs
in groups are a few dozen sets. Where there would be more than MOST_SETS, the set is grown link by link from each
device (greedy): it meets the conditions, and may not have the best score.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from gpuyard.core.scheduling.numbers import MOST_SETS
from gpuyard.core.topology import Topology

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
