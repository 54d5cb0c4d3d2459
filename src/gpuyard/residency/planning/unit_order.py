"""In which order the units are done, so that the fewest bytes move. Pure: the same units give the same order.

Scene by scene, every actor comes again for each scene; actor by actor, every scene. So the work is done in tiles: some
scenes (or actors) stay while all that they are paired with passes by, and every second pass goes backwards, so that
what is there at a turn is used again. How large the tiles ought to be depends on the budgets and on who is paired with
whom; therefore several orders are made, each is played through by `moved`, and the one that moves least is taken.

- The order is a permutation of the units. Units of one scene and actor stay together, unless the given order has them
  apart and moves less than any that was made.
- It never moves more than the given order, as `moved` counts. Of equals, the one nearest to the manifest is taken.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from math import inf

import msgspec

from gpuyard.residency.planning.assets import Asset, Budgets, Kind
from gpuyard.residency.planning.budget_limits import limits_of
from gpuyard.residency.planning.render_units import Unit

# A good disk gives 3 to 5 GB/s, PCIe about 50.
_READ_WEIGHT = 10
# Units that are played through in all, and pairs of pairs that are looked at: together they bound the time it takes.
_MOST_PLAYED = 300_000
_MOST_COMPARED = 2_000_000
# How much a tile fills of the VRAM for actors, and of VRAM and RAM together: what passes by needs the rest.
_VRAM_FILLS = (0.5, 0.25)
_RAM_FILLS = (0.9, 0.75, 0.5, 0.25)

_NOW = -1.0  # the next use of what a worker holds

_Key = str | None
_Pair = tuple[_Key, _Key]
_Table = Mapping[_Key, set[_Key]]  # from each key to those it is paired with; its order is the order of the keys
_Cut = Callable[[list[_Key]], list[list[_Key]]]


class MovedBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes from disk, and bytes over PCIe to the device."""

    read_bytes: int
    uploaded_bytes: int

    @property
    def weight(self) -> int:
        return _READ_WEIGHT * self.read_bytes + self.uploaded_bytes


def choose_order(
    units: Sequence[Unit], assets: Mapping[str, Asset], budgets: Budgets, *, workers: int = 1
) -> list[Unit]:
    """The units in the order that moves the fewest bytes, of those that were tried."""
    of_pair: dict[_Pair, list[Unit]] = {}
    for unit in units:
        of_pair.setdefault((unit.scene, unit.actor), []).append(unit)
    tried = islice(_candidates(of_pair, assets, budgets), max(3, _MOST_PLAYED // max(1, len(units))))
    # A dictionary: many tables have the same order in tiles of several sizes.
    orders = [[unit for pair in pairs for unit in of_pair[pair]] for pairs in dict.fromkeys(map(tuple, tried))]
    return min([*orders, list(units)], key=lambda order: moved(order, assets, budgets, workers=workers).weight)


def moved(units: Sequence[Unit], assets: Mapping[str, Asset], budgets: Budgets, *, workers: int = 1) -> MovedBytes:
    """What this order moves where each tier gives up what is needed again last.

    So many workers hold the assets of as many units, one after the other, at a time.
    """
    tiers = _Tiers(assets, budgets)
    next_uses = _next_uses(units)
    for now, unit in enumerate(units):
        if now >= workers:
            tiers.release(units[now - workers], *next_uses[now - workers], now)
        tiers.hold(unit)
    return MovedBytes(read_bytes=tiers.read_bytes, uploaded_bytes=tiers.uploaded_bytes)


def _next_uses(units: Sequence[Unit]) -> list[tuple[float, float]]:
    """For each unit: which one needs its scene next, and which one its actor."""
    soonest: dict[_Key, float] = {}
    found = []
    for place in range(len(units) - 1, -1, -1):
        scene, actor = units[place].scene, units[place].actor
        found.append((soonest.get(scene, inf), soonest.get(actor, inf)))
        soonest[scene] = soonest[actor] = place
    return found[::-1]


class _Tier:
    """What is held in one place, within so many bytes and so many assets."""

    def __init__(self, nbytes: int, count: float = inf) -> None:
        self.nbytes = nbytes
        self._count = count
        self.held: dict[str, int] = {}
        self._used = 0
        # A heap, the farthest next use first. What was used since it came in is there again, and outdated.
        self._idle: list[tuple[float, str]] = []

    def add(self, key: str, nbytes: int, next_use: float) -> None:
        if key not in self.held:
            self.held[key] = nbytes
            self._used += nbytes
            self.mark(key, next_use)

    def remove(self, key: str) -> None:
        self._used -= self.held.pop(key, 0)

    def mark(self, key: str, next_use: float) -> None:
        if next_use != _NOW:
            heappush(self._idle, (-next_use, key))

    def make_room(self, newcomer: str, next_use: Mapping[str, float]) -> list[str]:
        """Who had to go: whoever is needed last goes first."""
        gone = []
        while (self._used > self.nbytes or len(self.held) > self._count) and len(self.held) > 1:
            gone.append(self._needed_last(newcomer, next_use))
            self.remove(gone[-1])
        return gone

    def _needed_last(self, newcomer: str, next_use: Mapping[str, float]) -> str:
        while self._idle:
            farthest, key = heappop(self._idle)
            if key in self.held and next_use[key] == -farthest:
                return key
        # Workers hold them all; the newcomer waits for the first of them.
        return next(key for key in self.held if key != newcomer)


class _Tiers:
    """VRAM for scenes, VRAM for actors, and RAM. An asset is in one of them, and in RAM while it is on its way up."""

    def __init__(self, assets: Mapping[str, Asset], budgets: Budgets) -> None:
        self._nbytes = {key: asset.nbytes for key, asset in assets.items()}
        limits = limits_of(assets.values(), budgets)
        self._scenes = _Tier(limits.vram - limits.actors, limits.scene_slots)
        self._actors = _Tier(limits.actors)
        self._ram = _Tier(limits.ram)
        self._next_use: dict[str, float] = {}
        self.read_bytes = self.uploaded_bytes = 0

    def hold(self, unit: Unit) -> None:
        if unit.scene is not None:
            self._next_use[unit.scene] = _NOW
            if unit.scene not in self._scenes.held:
                self._bring(unit.scene, self._scenes)
        if unit.actor is not None:
            self._next_use[unit.actor] = _NOW
            if unit.actor not in self._actors.held:
                self._bring_or_stream(unit.actor, len(unit.labels))

    def release(self, unit: Unit, scene_next: float, actor_next: float, now: int) -> None:
        """Unless a unit that came later, but before `now`, holds it too."""
        if unit.scene is not None and scene_next >= now:
            self._let_go(unit.scene, scene_next, self._scenes)
        if unit.actor is not None and actor_next >= now:
            self._let_go(unit.actor, actor_next, self._actors)

    def _let_go(self, key: str, next_use: float, tier: _Tier) -> None:
        self._next_use[key] = next_use
        # A streamed actor is in RAM alone.
        (tier if key in tier.held else self._ram).mark(key, next_use)

    def _bring_or_stream(self, actor: str, labels: int) -> None:
        nbytes = self._nbytes.get(actor, 0)
        beside = sum(size for other, size in self._actors.held.items() if self._next_use[other] == _NOW)
        if beside + nbytes <= self._actors.nbytes:
            self._bring(actor, self._actors)
            return
        for _ in range(1 if nbytes <= self._ram.nbytes else labels):
            self._stage(actor, nbytes, ())
        self.uploaded_bytes += nbytes * labels

    def _bring(self, key: str, tier: _Tier) -> None:
        nbytes = self._nbytes.get(key, 0)
        tier.add(key, nbytes, _NOW)
        self._stage(key, nbytes, tier.make_room(key, self._next_use))
        self._ram.remove(key)
        self.uploaded_bytes += nbytes

    def _stage(self, key: str, nbytes: int, leaving: Iterable[str]) -> None:
        """Have it in RAM, beside what comes down from VRAM. What is larger than the RAM goes through it in pieces."""
        if key not in self._ram.held:
            self.read_bytes += nbytes
        for other in (key, *leaving):
            if (size := self._nbytes.get(other, 0)) <= self._ram.nbytes:
                self._ram.add(other, size, self._next_use[other])
        self._ram.make_room(key, self._next_use)


def _candidates(pairs: Iterable[_Pair], assets: Mapping[str, Asset], budgets: Budgets) -> Iterator[Iterable[_Pair]]:
    """Orders worth trying, the most promising first; each as it comes, then with those beside each other who share."""
    yield pairs
    scenes, actors = _table(pairs), _table((actor, scene) for scene, actor in pairs)
    tables = [(scenes, actors), (_near(scenes, actors, assets), _near(actors, scenes, assets))]
    if [*map(list, tables[0])] == [*map(list, tables[1])]:
        tables.pop()
    for stays, outer, inner in _tilings(assets, budgets):
        for by_scene, by_actor in tables:
            if stays is Kind.SCENE:
                yield _weave(by_scene, by_actor, outer, inner)
            else:
                yield ((scene, actor) for actor, scene in _weave(by_actor, by_scene, outer, inner))


def _tilings(assets: Mapping[str, Asset], budgets: Budgets) -> Iterator[tuple[Kind, _Cut, _Cut]]:
    """Who stays, in tiles of which size, and in groups of which size the others pass by."""

    def by_bytes(most: float) -> _Cut:
        return partial(_cut, weigh=partial(_nbytes, assets), most=most)

    def by_count(most: int) -> _Cut:
        return partial(_cut, weigh=lambda _: 1, most=most)

    limits = limits_of(assets.values(), budgets)
    slots, for_actors, for_all = limits.scene_slots, limits.actors, limits.vram + limits.ram
    yield Kind.SCENE, by_count(slots), by_count(1)
    yield Kind.ACTOR, by_bytes(for_actors), by_count(1)
    for count in range(1, slots):
        yield Kind.SCENE, by_count(count), by_count(1)
    for fill in _VRAM_FILLS:
        yield Kind.ACTOR, by_bytes(fill * for_actors), by_count(1)
    # What stays in RAM passes the VRAM in groups: fewer bytes from disk, for more over PCIe.
    for part, count in ((1.0, slots), (0.5, 1)):
        for fill in _RAM_FILLS:
            yield Kind.SCENE, by_bytes(fill * for_all), by_bytes(part * for_actors)
            yield Kind.ACTOR, by_bytes(fill * for_all), by_count(count)


def _nbytes(assets: Mapping[str, Asset], key: _Key) -> int:
    return assets[key].nbytes if key is not None and key in assets else 0


def _cut(keys: Iterable[_Key], *, weigh: Callable[[_Key], float], most: float) -> list[list[_Key]]:
    tiles: list[list[_Key]] = []
    left = -inf
    for key in keys:
        left -= weigh(key)
        if left < 0:
            tiles.append([])
            left = most - weigh(key)
        tiles[-1].append(key)
    return tiles


def _table(pairs: Iterable[_Pair]) -> _Table:
    table: dict[_Key, set[_Key]] = {}
    for row, column in pairs:
        table.setdefault(row, set()).add(column)
    return table


def _near(rows: _Table, columns: _Table, assets: Mapping[str, Asset]) -> _Table:
    """The rows, each followed by the one that shares the most bytes with it."""
    if sum(len(others) ** 2 for others in columns.values()) > _MOST_COMPARED:
        return rows
    left = {row: place for place, row in enumerate(rows)}
    shared: dict[_Key, int] = {}
    ordered: dict[_Key, set[_Key]] = {}
    while left:
        row = min(shared, key=lambda row: (-shared[row], left[row])) if shared else next(iter(left))
        ordered[row] = rows[row]
        del left[row]
        shared = {}
        for column in rows[row]:
            nbytes = _nbytes(assets, column)
            for other in columns[column] & left.keys():
                shared[other] = shared.get(other, 0) + nbytes
    return ordered


def _weave(rows: _Table, columns: _Table, outer: _Cut, inner: _Cut) -> Iterator[_Pair]:
    """Tile by tile of rows, all their columns pass by in groups; each pass in the other direction than the last."""
    row_place, column_place = ({key: place for place, key in enumerate(table)} for table in (rows, columns))
    tiles = outer(list(rows))
    met: list[set[_Key]] = [set(), *(set().union(*map(rows.__getitem__, tile)) for tile in tiles), set()]
    is_back = False
    for number, here in enumerate(map(set, tiles), 1):
        passing = sorted(met[number], key=column_place.__getitem__, reverse=number % 2 == 0)
        # What the tile before has left there comes first, what the next one will want comes last.
        passing.sort(key=lambda column: (column in met[number + 1]) - (column in met[number - 1]))
        for group in inner(passing):
            inside = set().union(*(columns[column] & here for column in group))
            for row in sorted(inside, key=row_place.__getitem__, reverse=is_back):
                yield from ((row, column) for column in group if column in rows[row])
            is_back = not is_back
