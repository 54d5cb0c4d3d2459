"""Choose the order of units that moves the fewest bytes. Pure: the same units give the same order.

Scene by scene, every actor is loaded again for each scene; actor by actor, every scene. So the work is split into
tiles: some scenes (or actors) stay loaded while all their partners pass by, and every second pass goes backwards. The
best tile size depends on the budgets and on the pairs, so `moved` simulates several orders. Units of one scene and
actor stay together, unless the given order moves fewer bytes than all others. Among equal orders, the nearest to the
manifest is chosen."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from math import inf

import msgspec

from gpuyard.recipes.render.planning.assets_and_units import Asset, Budgets, Kind, Unit, limits_of

_NOW = -1.0  # the next use of an asset that a worker holds

_Key = str | None
_Pair = tuple[_Key, _Key]
_Table = Mapping[_Key, set[_Key]]  # the partners of each key; the order of the mapping is the order of the keys
_Cut = Callable[[list[_Key]], list[list[_Key]]]


class MovedBytes(msgspec.Struct, frozen=True, kw_only=True):
    read_bytes: int
    uploaded_bytes: int

    @property
    def weight(self) -> int:
        return 10 * self.read_bytes + self.uploaded_bytes  # a good disk reads 3 to 5 GB/s, PCIe transfers about 50


def choose_order(
    units: Sequence[Unit], assets: Mapping[str, Asset], budgets: Budgets, *, workers: int = 1
) -> list[Unit]:
    """Return the units in the order that moves the fewest bytes, of all orders tried."""
    by_pair: dict[_Pair, list[Unit]] = {}
    for unit in units:
        by_pair.setdefault((unit.scene, unit.actor), []).append(unit)
    # This limit on the units simulated, and that on the pairs compared, bound the run time.
    tried = islice(_candidates(by_pair, assets, budgets), max(3, 300_000 // max(1, len(units))))
    # dict.fromkeys removes duplicates: many tables have the same order for several tile sizes.
    orders = [[unit for pair in pairs for unit in by_pair[pair]] for pairs in dict.fromkeys(map(tuple, tried))]
    return min([*orders, list(units)], key=lambda order: moved(order, assets, budgets, workers=workers).weight)


def moved(units: Sequence[Unit], assets: Mapping[str, Asset], budgets: Budgets, *, workers: int = 1) -> MovedBytes:
    """Return the bytes that this order moves if each tier evicts the asset that is needed again last. `workers` units
    in a row hold their assets at a time."""
    tiers = _Tiers(assets, budgets)
    soonest: dict[_Key, float] = {}
    next_uses = [(inf, inf)] * len(units)  # the places where a unit's scene and its actor are needed next
    for place in range(len(units) - 1, -1, -1):
        scene, actor = units[place].scene, units[place].actor
        next_uses[place] = soonest.get(scene, inf), soonest.get(actor, inf)
        soonest[scene] = soonest[actor] = place
    for now, unit in enumerate(units):
        if now >= workers:
            tiers.release(units[now - workers], *next_uses[now - workers], now)
        tiers.hold(unit)
    return MovedBytes(read_bytes=tiers.read_bytes, uploaded_bytes=tiers.uploaded_bytes)


class _Tier:
    """The assets in one tier, limited in bytes and in number."""

    def __init__(self, nbytes: int, count: float = inf) -> None:
        self.nbytes = nbytes
        self._count = count
        self.held: dict[str, int] = {}
        self._used = 0
        # A heap, the farthest next use first. Entries of assets that were used since are outdated.
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

    def evict_excess(self, newcomer: str, next_use: Mapping[str, float]) -> list[str]:
        """Evict the assets that are needed last until the limits hold. Return them."""
        evicted = []
        while (self._used > self.nbytes or len(self.held) > self._count) and len(self.held) > 1:
            while self._idle:
                farthest, last = heappop(self._idle)
                if last in self.held and next_use[last] == -farthest:
                    break
            else:  # workers hold all assets; the newcomer waits for the first
                last = next(key for key in self.held if key != newcomer)
            evicted.append(last)
            self.remove(last)
        return evicted


class _Tiers:
    """VRAM for scenes, VRAM for actors, and RAM. An asset is in one of them, and also in RAM during its upload."""

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
                self._load(unit.scene, self._scenes)
        if unit.actor is not None:
            self._next_use[unit.actor] = _NOW
            if unit.actor not in self._actors.held:
                nbytes = self._nbytes.get(unit.actor, 0)
                beside = sum(size for other, size in self._actors.held.items() if self._next_use[other] == _NOW)
                if beside + nbytes <= self._actors.nbytes:
                    self._load(unit.actor, self._actors)
                    return
                for _ in range(1 if nbytes <= self._ram.nbytes else len(unit.labels)):
                    self._stage(unit.actor, nbytes, ())
                self.uploaded_bytes += nbytes * len(unit.labels)

    def release(self, unit: Unit, scene_next: float, actor_next: float, now: int) -> None:
        """Release a unit's assets, unless a later unit before `now` holds them too."""
        for key, next_use, tier in ((unit.scene, scene_next, self._scenes), (unit.actor, actor_next, self._actors)):
            if key is not None and next_use >= now:
                self._next_use[key] = next_use
                # A streamed actor is only in RAM.
                (tier if key in tier.held else self._ram).mark(key, next_use)

    def _load(self, key: str, tier: _Tier) -> None:
        nbytes = self._nbytes.get(key, 0)
        tier.add(key, nbytes, _NOW)
        self._stage(key, nbytes, tier.evict_excess(key, self._next_use))
        self._ram.remove(key)
        self.uploaded_bytes += nbytes

    def _stage(self, key: str, nbytes: int, leaving: Iterable[str]) -> None:
        """Put the asset and those that leave VRAM into RAM. Assets larger than RAM pass through it in parts."""
        if key not in self._ram.held:
            self.read_bytes += nbytes
        for other in (key, *leaving):
            if (size := self._nbytes.get(other, 0)) <= self._ram.nbytes:
                self._ram.add(other, size, self._next_use[other])
        self._ram.evict_excess(key, self._next_use)


def _candidates(pairs: Iterable[_Pair], assets: Mapping[str, Asset], budgets: Budgets) -> Iterator[Iterable[_Pair]]:
    """Yield orders to try, the most promising first; each as given, then with keys that share partners adjacent."""
    yield pairs
    scenes, actors = _table(pairs), _table((actor, scene) for scene, actor in pairs)
    tables = [(scenes, actors), (_group_similar(scenes, actors, assets), _group_similar(actors, scenes, assets))]
    if [*map(list, tables[0])] == [*map(list, tables[1])]:
        tables.pop()
    for stays, outer, inner in _tilings(assets, budgets):
        for by_scene, by_actor in tables:
            if stays is Kind.SCENE:
                yield _weave(by_scene, by_actor, outer, inner)
            else:
                yield ((scene, actor) for actor, scene in _weave(by_actor, by_scene, outer, inner))


def _tilings(assets: Mapping[str, Asset], budgets: Budgets) -> Iterator[tuple[Kind, _Cut, _Cut]]:
    """Yield the kind that stays, how to split it into tiles, and how to split the passing kind into groups."""

    def by_bytes(most: float) -> _Cut:
        return partial(_split_by_weight, weigh=partial(_nbytes, assets), most=most)

    def by_count(most: int) -> _Cut:
        return partial(_split_by_weight, weigh=lambda _: 1, most=most)

    limits = limits_of(assets.values(), budgets)
    slots, for_actors, for_all = limits.scene_slots, limits.actors, limits.vram + limits.ram
    yield Kind.SCENE, by_count(slots), by_count(1)
    yield Kind.ACTOR, by_bytes(for_actors), by_count(1)
    for count in range(1, slots):
        yield Kind.SCENE, by_count(count), by_count(1)
    # A tile fills a fraction of the VRAM for actors, or of VRAM and RAM together: passing assets need the rest.
    for fill in (0.5, 0.25):
        yield Kind.ACTOR, by_bytes(fill * for_actors), by_count(1)
    # Assets that stay in RAM pass through VRAM in groups: fewer bytes from disk, but more uploads.
    for part, count in ((1.0, slots), (0.5, 1)):
        for fill in (0.9, 0.75, 0.5, 0.25):
            yield Kind.SCENE, by_bytes(fill * for_all), by_bytes(part * for_actors)
            yield Kind.ACTOR, by_bytes(fill * for_all), by_count(count)


def _nbytes(assets: Mapping[str, Asset], key: _Key) -> int:
    return assets[key].nbytes if key is not None and key in assets else 0


def _split_by_weight(keys: Iterable[_Key], *, weigh: Callable[[_Key], float], most: float) -> list[list[_Key]]:
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


def _group_similar(rows: _Table, columns: _Table, assets: Mapping[str, Asset]) -> _Table:
    """Return the rows, each followed by the one that shares the most bytes with it."""
    if sum(len(others) ** 2 for others in columns.values()) > 2_000_000:
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
    """Yield pairs tile by tile of rows; all columns of a tile pass by in groups, each pass in reverse direction."""
    row_place, column_place = ({key: place for place, key in enumerate(table)} for table in (rows, columns))
    tiles = outer(list(rows))
    partners: list[set[_Key]] = [set(), *(set().union(*map(rows.__getitem__, tile)) for tile in tiles), set()]
    is_reversed = False
    for number, tile in enumerate(map(set, tiles), 1):
        passing = sorted(partners[number], key=column_place.__getitem__, reverse=number % 2 == 0)
        # Columns that the previous tile left loaded come first, columns that the next tile needs come last.
        passing.sort(key=lambda column: (column in partners[number + 1]) - (column in partners[number - 1]))
        for group in inner(passing):
            inside = set().union(*(columns[column] & tile for column in group))
            for row in sorted(inside, key=row_place.__getitem__, reverse=is_reversed):
                yield from ((row, column) for column in group if column in rows[row])
            is_reversed = not is_reversed
