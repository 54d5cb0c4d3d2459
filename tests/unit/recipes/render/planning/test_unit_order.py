"""The order of units: none is lost, the order is never worse than the given one, and tiles save transfers."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.recipes.render.planning.assets_and_units import Asset, Budgets, Kind, Label, Unit
from gpuyard.recipes.render.planning.unit_order import MovedBytes, choose_order, moved

SCENES, ACTORS = ("s0", "s1", "s2", "s3"), ("a0", "a1", "a2", "a3")
Pair = tuple[str | None, str | None]


def units_of(pairs: Iterable[Pair], labels: int = 1) -> list[Unit]:
    return [
        Unit(scene=scene, actor=actor, labels=tuple(Label(name=f"{n}-{k}", value={}) for k in range(labels)))
        for n, (scene, actor) in enumerate(pairs)
    ]


def pairs_of(units: Iterable[Unit]) -> list[Pair]:
    return [(unit.scene, unit.actor) for unit in units]


def assets_of(sizes: Mapping[str, int]) -> dict[str, Asset]:
    return {key: Asset(key=key, kind=kind_of(key), nbytes=nbytes) for key, nbytes in sizes.items()}


def kind_of(key: str) -> Kind:
    return Kind.SCENE if key.startswith("s") else Kind.ACTOR


def product(scenes: int, actors: int) -> list[Pair]:
    """Return all pairs in an inefficient order."""
    pairs: list[Pair] = [(f"s{s}", f"a{a}") for s in range(scenes) for a in range(actors)]
    Random(1).shuffle(pairs)
    return pairs


ONES = assets_of(dict.fromkeys([*SCENES, *ACTORS], 1))
any_pair = st.tuples(st.sampled_from([None, *SCENES]), st.sampled_from([None, *ACTORS]))
any_units = st.lists(any_pair, max_size=16).map(lambda pairs: units_of(pairs, labels=2))
# Some assets have no size: a file that could not be read.
any_assets = st.dictionaries(st.sampled_from([*SCENES, *ACTORS]), st.integers(0, 6)).map(assets_of)
any_budgets = st.builds(
    Budgets, vram=st.integers(0, 24), ram=st.integers(0, 20), scene_slots=st.integers(1, 3), working=st.integers(0, 3)
)
any_workers = st.integers(1, 3)


@given(any_units, any_assets, any_budgets, any_workers)
def test_every_unit_occurs_once_and_pairs_stay_together_if_the_order_changes(
    units: list[Unit], assets: dict[str, Asset], budgets: Budgets, workers: int
) -> None:
    order = choose_order(units, assets, budgets, workers=workers)
    assert sorted(unit.labels[0].name for unit in order) == sorted(unit.labels[0].name for unit in units)
    runs = [pair for pair, _ in groupby(pairs_of(order))]
    assert len(runs) == len(set(runs)) or order == units


@given(any_units, any_assets, any_budgets, any_workers)
def test_the_chosen_order_never_moves_more_than_the_given_order(
    units: list[Unit], assets: dict[str, Asset], budgets: Budgets, workers: int
) -> None:
    order = choose_order(units, assets, budgets, workers=workers)
    chosen, as_given = (moved(some, assets, budgets, workers=workers) for some in (order, units))
    assert chosen.weight <= as_given.weight


@given(any_units, any_assets)
def test_if_everything_fits_the_order_of_the_manifest_stays_and_each_asset_moves_once(
    units: list[Unit], assets: dict[str, Asset]
) -> None:
    budgets = Budgets(vram=100, ram=100, scene_slots=len(SCENES))
    order = choose_order(units, assets, budgets)
    first_met = list(dict.fromkeys(pairs_of(units)))
    assert order == sorted(units, key=lambda unit: first_met.index((unit.scene, unit.actor)))
    used = {key for pair in first_met for key in pair if key in assets}
    once = sum(assets[key].nbytes for key in used)
    assert moved(order, assets, budgets) == MovedBytes(read_bytes=once, uploaded_bytes=once)


def test_the_order_does_not_depend_on_how_strings_are_hashed() -> None:
    program = (
        "from tests.unit.recipes.render.planning.test_unit_order import *\n"
        "pairs = [pair for pair in product(12, 12) if Random(str(pair)).random() < 0.4]\n"
        "sizes = {key: Random(key).randint(1, 9) for pair in pairs for key in pair}\n"
        "print(pairs_of(choose_order(units_of(pairs), assets_of(sizes), Budgets(vram=30, ram=20, scene_slots=3))))"
    )
    orders = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[5],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(orders) == 1


# 20 scenes of 3 and 20 actors of 2; beside 5 scenes 10 actors fit into VRAM.
TWENTY = assets_of({**{f"s{n}": 3 for n in range(20)}, **{f"a{n}": 2 for n in range(20)}})


def test_tiles_upload_a_third_of_the_bytes_and_are_of_the_larger_kind() -> None:
    budgets = Budgets(vram=5 * 3 + 10 * 2, ram=1000, scene_slots=5)
    units = units_of(product(20, 20))
    by_scene = sorted(units, key=lambda unit: (unit.scene, unit.actor))
    # Cycling through 20 actors with space for 10: 10 of each 19 uses after the first round are misses.
    assert moved(by_scene, TWENTY, budgets) == MovedBytes(
        read_bytes=100, uploaded_bytes=20 * 3 + (20 + 380 * 10 // 19) * 2
    )
    # Two tiles of 10 actors: each actor is uploaded once, and the second tile finds 5 of the 20 scenes loaded.
    chosen = choose_order(units, TWENTY, budgets)
    assert moved(chosen, TWENTY, budgets) == MovedBytes(read_bytes=100, uploaded_bytes=20 * 2 + (20 + 15) * 3)
    assets = assets_of({**{f"s{n}": 10 for n in range(20)}, **{f"a{n}": 1 for n in range(20)}})
    budgets = Budgets(vram=10 * 10 + 5, ram=1000, scene_slots=10)
    chosen = choose_order(units_of(product(20, 20)), assets, budgets)
    # Two tiles of 10 scenes: each scene is uploaded once, and the second tile finds 5 of the 20 actors loaded.
    assert moved(chosen, assets, budgets).uploaded_bytes == 20 * 10 + (20 + 15) * 1


def test_tiles_use_ram_too_if_it_holds_half_of_each_kind() -> None:
    assets = assets_of({f"{kind}{n}": 1 for kind in "sa" for n in range(30)})
    budgets = Budgets(vram=2 + 2, ram=16, scene_slots=2)
    chosen = choose_order(units_of(product(30, 30)), assets, budgets)
    figures = moved(chosen, assets, budgets)
    # Two tiles of 15: these are read once, the 30 that pass by at most twice. Tiles in VRAM alone would be 15.
    assert figures.read_bytes <= 30 + 2 * 30
    # They pass by in 15 groups of 2; for each of these the whole tile comes to VRAM but the 2 at the turn, and at the
    # turn of the second tile 2 of those that pass by are loaded.
    assert figures.uploaded_bytes == 2 * (15 + 14 * 13) + 30 + 28


def test_scenes_that_share_an_actor_with_the_next_are_rendered_as_a_chain() -> None:
    chain: list[Pair] = [(f"s{n}", f"a{n + step}") for n in range(12) for step in (0, 1)]
    units = units_of([chain[0], *Random(1).sample(chain[1:], k=len(chain) - 1)])
    assets = assets_of({**{f"s{n}": 1 for n in range(12)}, **{f"a{n}": 1 for n in range(13)}})
    budgets = Budgets(vram=1 + 1, ram=0, scene_slots=1)
    chosen = choose_order(units, assets, budgets)
    assert pairs_of(chosen) == chain
    assert moved(chosen, assets, budgets) == MovedBytes(read_bytes=25, uploaded_bytes=25)


def test_an_actor_of_very_many_scenes_stays_loaded_for_all_of_them() -> None:
    scenes = [f"s{n}" for n in range(1500)]
    assets = assets_of({**dict.fromkeys(scenes, 1), "a0": 2, "a1": 2})
    budgets = Budgets(vram=1 + 2, ram=0, scene_slots=1)
    chosen = choose_order(units_of((scene, actor) for scene in scenes for actor in ("a0", "a1")), assets, budgets)
    # Scene by scene back and forth, or actor by actor: one kind is loaded twice, and scenes are smaller.
    assert moved(chosen, assets, budgets).uploaded_bytes == 1500 + 1499 + 2 + 2


def test_an_actor_without_enough_memory_is_uploaded_per_label_and_read_once_if_ram_holds_it() -> None:
    assets = assets_of({"s0": 3, "a0": 5})
    units = units_of([("s0", "a0"), ("s0", "a0")], labels=4)
    budgets = Budgets(vram=3 + 4, ram=5, scene_slots=1)
    assert moved(units, assets, budgets) == MovedBytes(read_bytes=3 + 5, uploaded_bytes=3 + 8 * 5)
    budgets = Budgets(vram=3 + 4, ram=4, scene_slots=1)
    assert moved(units, assets, budgets) == MovedBytes(read_bytes=3 + 8 * 5, uploaded_bytes=3 + 8 * 5)
    assets = assets_of({"s0": 3, "a0": 4})
    units = units_of([("s0", "a0")], labels=4)
    fits = Budgets(vram=9, ram=10, scene_slots=1, working=2)
    assert moved(units, assets, fits).uploaded_bytes == 3 + 4
    streams = Budgets(vram=9, ram=10, scene_slots=1, working=3)
    assert moved(units, assets, streams).uploaded_bytes == 3 + 4 * 4
    scene, actor = (Asset(key=key, kind=kind_of(key), nbytes=4, frame_nbytes=1) for key in ("s0", "a0"))
    units = units_of([("s0", "a0")], labels=3)
    fits, streams = (Budgets(vram=4 + 4 + left, ram=10, scene_slots=1) for left in (2, 1))
    assert moved(units, {"s0": scene, "a0": actor}, fits).uploaded_bytes == 4 + 4
    assert moved(units, {"s0": scene, "a0": actor}, streams).uploaded_bytes == 4 + 3 * 4


def test_actors_of_other_workers_take_memory_until_the_last_worker_is_done() -> None:
    assets = assets_of({"s0": 1, "a0": 2, "a1": 2})
    units = units_of([("s0", "a0"), ("s0", "a1")], labels=3)
    budgets = Budgets(vram=1 + 3, ram=10, scene_slots=1)
    assert moved(units, assets, budgets, workers=1).uploaded_bytes == 1 + 2 + 2
    assert moved(units, assets, budgets, workers=2).uploaded_bytes == 1 + 2 + 3 * 2
    assets = assets_of({"s0": 1, "a0": 2, "a1": 2})
    units = units_of([("s0", "a0"), ("s0", "a0"), ("s0", "a1")], labels=3)
    budgets = Budgets(vram=1 + 3, ram=10, scene_slots=1)
    assert moved(units, assets, budgets, workers=2).uploaded_bytes == 1 + 2 + 3 * 2


def test_a_scene_waits_for_its_slot_in_ram_and_is_not_evicted_when_just_reloaded() -> None:
    units = units_of([("s1", None), ("s0", None), ("s1", None)])
    roomy, narrow = (Budgets(vram=1, ram=ram, scene_slots=1) for ram in (2, 1))
    assert moved(units, ONES, roomy, workers=2) == MovedBytes(read_bytes=2, uploaded_bytes=3)
    assert moved(units, ONES, narrow, workers=2) == MovedBytes(read_bytes=3, uploaded_bytes=3)
    uses = ["s0", None, "s0", None, "s1", "s0", "s0"]
    units = units_of((scene, None) for scene in uses)
    budgets = Budgets(vram=1, ram=4, scene_slots=1)
    assert moved(units, ONES, budgets, workers=2) == MovedBytes(read_bytes=2, uploaded_bytes=3)


def test_the_given_order_is_kept_if_separating_a_pair_saves_transfers() -> None:
    # The units in between give the first worker time to finish with an actor before the next is needed.
    units = units_of([("s0", None), ("s0", "a0"), ("s0", None), ("s0", "a1"), ("s0", "a1")], labels=3)
    budgets = Budgets(vram=1 + 1, ram=10, scene_slots=1)
    assert choose_order(units, ONES, budgets, workers=2) == units
    assert pairs_of(choose_order(units, ONES, budgets, workers=1))[:2] == [("s0", None), ("s0", None)]


def test_without_units_the_order_is_empty() -> None:
    assert choose_order([], {}, Budgets(vram=1, ram=1)) == []
    assert moved([], {}, Budgets(vram=1, ram=1)) == MovedBytes(read_bytes=0, uploaded_bytes=0)
