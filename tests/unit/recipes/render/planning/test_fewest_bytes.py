"""The bytes that the plan moves, compared with the minimum for a known order of uses."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from gpuyard.recipes.render.planning.assets_and_units import Budgets, Unit
from gpuyard.recipes.render.planning.unit_order import choose_order
from tests.scale import some
from tests.unit.recipes.render.planning.plan_simulation import (
    Case,
    Pick,
    PlanSimulation,
    actor,
    at_random,
    case_of,
    moving_first,
    scene,
    unit,
    working_first,
)

pytestmark = pytest.mark.no_cover  # other tests cover the same lines, and with coverage these take three times as long

SIZE = 100


def fewest(order: Sequence[Any], places: int) -> int:
    """Return the minimum number of loads with `places` places: evict the asset with the farthest next use."""
    uses = {key: [place for place, other in enumerate(order) if other == key] for key in set(order)}
    loaded: set[Any] = set()
    brought = 0
    for key in order:
        uses[key].pop(0)
        if key not in loaded:
            brought += 1
            if len(loaded) == places:
                loaded.remove(max(loaded, key=lambda other: uses[other][0] if uses[other] else len(order)))
            loaded.add(key)
    return brought


def orders(length: int, of: int, seed: int) -> list[int]:
    """Return several orders: random, a random walk, cyclic, and skewed."""
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
    """Sums over several simulations, in assets."""

    def __init__(self) -> None:
        self.uploaded = self.fewest_uploaded = self.read = self.fewest_read = 0

    def add(self, simulation: PlanSimulation, uploads: int, reads: int) -> None:
        assert simulation.streamed == 0
        self.uploaded += simulation.uploaded // SIZE
        self.read += simulation.read_nbytes // SIZE
        self.fewest_uploaded += uploads
        self.fewest_read += reads


# Slots in VRAM, and assets that fit into RAM.
SIZES = [(2, 10), (2, 20), (5, 10), (5, 20), (3, 15), (4, 25)]
NARROW_SIZES = [(2, 5), (5, 5), (3, 4), (4, 4)]
LENGTH = 200


def play_one_kind(seed: int, slots: int, ram: int, pick: Pick, *, is_scene: bool) -> tuple[PlanSimulation, list[int]]:
    order = orders(LENGTH, Random(seed).choice([8, 15, 30, 45]), seed)
    assets = [scene(number, SIZE) if is_scene else actor(number, SIZE, 1) for number in set(order)]
    units = [unit(number) if is_scene else unit(None, number) for number in order]
    budgets = Budgets(vram=slots * SIZE + (0 if is_scene else 2), ram=ram * SIZE, scene_slots=slots)
    return PlanSimulation(case_of(assets, units, budgets)).run(pick), order


@pytest.mark.parametrize("is_scene", [True, False], ids=["scenes", "actors"])
@pytest.mark.parametrize("pick", some([moving_first, working_first], 1))
def test_with_one_kind_little_more_than_the_minimum_is_moved(pick: Pick, is_scene: bool) -> None:
    """An asset that moves between tiers takes one place in RAM."""
    sums = sums_of_one_kind(SIZES, pick, is_scene=is_scene)
    assert sums.uploaded <= 1.05 * sums.fewest_uploaded
    assert sums.read <= 1.05 * sums.fewest_read


@pytest.mark.parametrize("pick", some([moving_first, working_first], 1))
def test_if_ram_is_barely_larger_than_vram_a_little_more_is_read(pick: Pick) -> None:
    sums = sums_of_one_kind(NARROW_SIZES, pick, is_scene=True)
    assert sums.uploaded <= 1.08 * sums.fewest_uploaded
    assert sums.read <= 1.15 * sums.fewest_read


def sums_of_one_kind(sizes: list[tuple[int, int]], pick: Pick, *, is_scene: bool) -> Sums:
    sums = Sums()
    for seed, (slots, ram) in enumerate(sizes * 2):
        simulation, order = play_one_kind(seed, slots, ram, pick, is_scene=is_scene)
        sums.add(simulation, fewest(order, slots), fewest(order, slots + ram - 1))
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
    """Return the minimum uploads and reads, with two places in RAM for moving assets, one of each kind."""
    uploads = fewest([each.scene for each in units], slots) + fewest([each.actor for each in units], actors)
    return uploads, fewest([key for each in units for key in (each.scene, each.actor)], slots + actors + ram - 2)


@pytest.mark.parametrize(("pick", "more_read"), some([(moving_first, 1.05), (working_first, 1.15)], 1))
def test_with_both_kinds_little_more_than_the_minimum_is_moved(pick: Pick, more_read: float) -> None:
    """If nothing can be read ahead, an asset read at the last moment takes a place that others need."""
    sums = Sums()
    for seed, (slots, ram) in enumerate([(2, 4), (3, 6), (4, 8), (2, 12)]):
        units = product(10, 10, seed)
        simulation = PlanSimulation(both_kinds(slots, slots, ram, units)).run(pick)
        sums.add(simulation, *fewest_of_both(units, slots, slots, ram))
    assert sums.uploaded <= 1.05 * sums.fewest_uploaded
    assert sums.read <= more_read * sums.fewest_read


@pytest.mark.parametrize("workers", some([1, 2, 4], 1))
def test_the_chosen_order_moves_far_less_than_a_shuffled_order(workers: int) -> None:
    shuffled = both_kinds(3, 3, 6, product(10, 10, 7), workers)
    chosen = choose_order(shuffled.units, shuffled.assets, shuffled.budgets, workers=workers)
    before = PlanSimulation(shuffled).run(moving_first)
    after = PlanSimulation(both_kinds(3, 3, 6, chosen, workers)).run(moving_first)
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
        simulation = PlanSimulation(both_kinds(5, 5, 8, chosen, workers)).run(pick(1))
        assert simulation.uploaded + simulation.streamed <= 1.1 * SIZE * uploads
        assert simulation.read_nbytes <= 1.1 * SIZE * reads
