"""What the plan moves, against the fewest bytes that the known future allows."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from gpuyard.residency.planning.assets import Budgets
from gpuyard.residency.planning.render_units import Unit
from gpuyard.residency.planning.unit_order import choose_order
from tests.scale import some
from tests.unit.residency.world import (
    Case,
    Pick,
    World,
    actor,
    at_random,
    case_of,
    moving_first,
    scene,
    unit,
    working_first,
)

pytestmark = pytest.mark.no_cover  # other tests go through the same lines, and these would take three times as long

SIZE = 100


def fewest(order: Sequence[Any], places: int) -> int:
    """How often something has to be brought where so many can be there at a time: farthest next use goes."""
    uses = {key: [place for place, other in enumerate(order) if other == key] for key in set(order)}
    there: set[Any] = set()
    brought = 0
    for key in order:
        uses[key].pop(0)
        if key not in there:
            brought += 1
            if len(there) == places:
                there.remove(max(there, key=lambda other: uses[other][0] if uses[other] else len(order)))
            there.add(key)
    return brought


def orders(length: int, of: int, seed: int) -> list[int]:
    """At random, on a walk, round and round, or some more often than others."""
    random = Random(seed)
    match seed % 4:
        case 0:
            return [random.randrange(of) for _ in range(length)]
        case 1:
            steps, at = (-2, -1, 0, 1, 2, 3), 0
            return [at := (at + random.choice(steps)) % of for _ in range(length)]
        case 2:
            return [place % of for place in range(length)]
        case _:
            return random.choices(range(of), [1 / (number + 1) for number in range(of)], k=length)


class Sums:
    """Bytes over several worlds, in assets."""

    def __init__(self) -> None:
        self.uploaded = self.fewest_uploaded = self.read = self.fewest_read = 0

    def add(self, world: World, uploads: int, reads: int) -> None:
        assert world.streamed == 0
        self.uploaded += world.uploaded // SIZE
        self.read += world.read_nbytes // SIZE
        self.fewest_uploaded += uploads
        self.fewest_read += reads


# Slots, and assets in RAM.
ROOMS = [(2, 10), (2, 20), (5, 10), (5, 20), (3, 15), (4, 25)]
NARROW = [(2, 5), (5, 5), (3, 4), (4, 4)]
LENGTH = 200


def play_one_kind(seed: int, slots: int, ram: int, pick: Pick, *, is_scene: bool) -> tuple[World, list[int]]:
    order = orders(LENGTH, Random(seed).choice([8, 15, 30, 45]), seed)
    assets = [scene(number, SIZE) if is_scene else actor(number, SIZE, 1) for number in set(order)]
    units = [unit(number) if is_scene else unit(None, number) for number in order]
    budgets = Budgets(vram=slots * SIZE + (0 if is_scene else 2), ram=ram * SIZE, scene_slots=slots)
    return World(case_of(assets, units, budgets)).run(pick), order


@pytest.mark.parametrize("is_scene", [True, False], ids=["scenes", "actors"])
@pytest.mark.parametrize("pick", some([moving_first, working_first], 1))
def test_of_one_kind_hardly_more_is_moved_than_the_known_future_asks_for(pick: Pick, is_scene: bool) -> None:
    """What changes places between the tiers takes one place of the RAM."""
    sums = sums_of_one_kind(ROOMS, pick, is_scene=is_scene)
    assert sums.uploaded <= 1.05 * sums.fewest_uploaded
    assert sums.read <= 1.05 * sums.fewest_read


@pytest.mark.parametrize("pick", some([moving_first, working_first], 1))
def test_where_ram_holds_hardly_more_than_vram_some_more_is_read(pick: Pick) -> None:
    sums = sums_of_one_kind(NARROW, pick, is_scene=True)
    assert sums.uploaded <= 1.08 * sums.fewest_uploaded
    assert sums.read <= 1.15 * sums.fewest_read


def sums_of_one_kind(rooms: list[tuple[int, int]], pick: Pick, *, is_scene: bool) -> Sums:
    sums = Sums()
    for seed, (slots, ram) in enumerate(rooms * 2):
        world, order = play_one_kind(seed, slots, ram, pick, is_scene=is_scene)
        sums.add(world, fewest(order, slots), fewest(order, slots + ram - 1))
    return sums


def product(scenes: int, actors: int, seed: int) -> list[Unit]:
    units = [unit(place, other) for place in range(scenes) for other in range(actors)]
    Random(seed).shuffle(units)
    return units


def both_kinds(slots: int, actors: int, ram: int, units: Sequence[Unit], workers: int = 1) -> Case:
    assets = [*(scene(number, SIZE) for number in range(10)), *(actor(number, SIZE, 1) for number in range(10))]
    budgets = Budgets(vram=(slots + actors) * SIZE + 2, ram=ram * SIZE, scene_slots=slots)
    return case_of(assets, units, budgets, workers=workers)


def fewest_of_both(units: Sequence[Unit], slots: int, actors: int, ram: int) -> tuple[int, int]:
    """Uploads, and reads where two places of the RAM are for what changes places, one of each kind."""
    uploads = fewest([each.scene for each in units], slots) + fewest([each.actor for each in units], actors)
    return uploads, fewest([key for each in units for key in (each.scene, each.actor)], slots + actors + ram - 2)


@pytest.mark.parametrize(("pick", "more_read"), some([(moving_first, 1.05), (working_first, 1.15)], 1))
def test_of_both_kinds_hardly_more_is_moved_than_the_known_future_asks_for(pick: Pick, more_read: float) -> None:
    """Where nothing can be read ahead of time, what is read at the last moment takes a place that others need."""
    sums = Sums()
    for seed, (slots, ram) in enumerate([(2, 4), (3, 6), (4, 8), (2, 12)]):
        units = product(10, 10, seed)
        world = World(both_kinds(slots, slots, ram, units)).run(pick)
        sums.add(world, *fewest_of_both(units, slots, slots, ram))
    assert sums.uploaded <= 1.05 * sums.fewest_uploaded
    assert sums.read <= more_read * sums.fewest_read


@pytest.mark.parametrize("workers", some([1, 2, 4], 1))
def test_the_chosen_order_moves_far_less_than_a_shuffled_one(workers: int) -> None:
    shuffled = both_kinds(3, 3, 6, product(10, 10, 7), workers)
    chosen = choose_order(shuffled.units, shuffled.assets, shuffled.budgets, workers=workers)
    before = World(shuffled).run(moving_first)
    after = World(both_kinds(3, 3, 6, chosen, workers)).run(moving_first)
    assert after.uploaded + after.streamed < 0.6 * (before.uploaded + before.streamed)
    assert after.read_nbytes < 0.6 * before.read_nbytes


PICKS: list[Callable[[int], Pick]] = [at_random, lambda _: moving_first]


@pytest.mark.parametrize("workers", some([2, 4], 0))
def test_several_workers_move_little_more_than_one_in_the_chosen_order(workers: int) -> None:
    units = product(10, 10, 3)
    alone = both_kinds(5, 5, 8, units)
    chosen = choose_order(units, alone.assets, alone.budgets, workers=workers)
    uploads, reads = fewest_of_both(chosen, 5, 5, 8)
    for pick in PICKS:
        world = World(both_kinds(5, 5, 8, chosen, workers)).run(pick(1))
        assert world.uploaded + world.streamed <= 1.1 * SIZE * uploads
        assert world.read_nbytes <= 1.1 * SIZE * reads
