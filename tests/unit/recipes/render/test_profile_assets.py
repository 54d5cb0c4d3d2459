"""Sizes and times of assets; an asset that cannot be measured has a problem."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.units import parse_size
from gpuyard.recipes.render.memory.device_memory import PagePool, page_size
from gpuyard.recipes.render.memory.leased_memory import Budget
from gpuyard.recipes.render.memory.read_asset_files import Loader
from gpuyard.recipes.render.planning.assets_and_units import (
    Asset,
    Budgets,
    Kind,
    Label,
    Unit,
    cannot_fit,
    key_of,
    limits_of,
)
from gpuyard.recipes.render.profile_assets import AssetProfile, Profiler, advise, assets_of, size_option
from tests.residency_files import splats, write_ply

NBYTES = 1000 * 62 * 4


def measured(folder: Path, *paths: str, vram_mb: float = 64.0, ram_mb: float = 64.0) -> list[AssetProfile]:
    assets = [AssetProfile(kind=Kind.SCENE, path=str(folder / path), labels=1) for path in paths]
    profiler = Profiler(Loader(), "host", Budget(mb=vram_mb), Budget(mb=ram_mb))
    found = list(profiler.measure(assets))
    assert profiler.name == "host"
    return found


def test_an_asset_is_measured_while_it_loads_and_a_broken_asset_affects_no_other(tmp_path: Path) -> None:
    write_ply(tmp_path / "a.ply", splats(1000))
    (tmp_path / "b.ply").write_bytes((tmp_path / "a.ply").read_bytes()[:-1])
    write_ply(tmp_path / "c.ply", splats(1000))
    one, broken, other = measured(tmp_path, "a.ply", "b.ply", "c.ply")
    for asset in (one, other):
        assert (asset.problem, asset.ram_nbytes, asset.vram_nbytes, asset.frames) == (None, NBYTES, NBYTES, 1)
        assert asset.load_s is not None
        assert asset.upload_s is not None
    assert "b.ply" in str(broken.problem)


def test_an_asset_larger_than_a_budget_is_reported_with_what_was_measured(tmp_path: Path) -> None:
    write_ply(tmp_path / "a.ply", splats(1000))
    (asset,) = measured(tmp_path, "a.ply", ram_mb=0.1)
    assert (asset.vram_nbytes, asset.load_s, asset.upload_s) == (NBYTES, None, None)
    assert "larger than the RAM budget" in str(asset.problem)
    write_ply(tmp_path / "a.ply", splats(1000))
    (asset,) = measured(tmp_path, "a.ply", vram_mb=0.1)
    assert asset.load_s is not None
    assert asset.upload_s is None
    assert "full" in str(asset.problem)


_MB = 1 << 20


def scene(nbytes: int) -> AssetProfile:
    return AssetProfile(kind=Kind.SCENE, path="s", labels=1, vram_nbytes=nbytes, frame_nbytes=nbytes)


def actor(nbytes: int, frame_nbytes: int) -> AssetProfile:
    return AssetProfile(kind=Kind.ACTOR, path="a", labels=1, vram_nbytes=nbytes, frame_nbytes=frame_nbytes)


def test_the_minimum_is_a_scene_and_two_frames_and_good_is_all_slots_and_an_actor() -> None:
    assets = [*(scene(size * 15 * _MB) for size in (3, 1, 2)), actor(45 * _MB, 15 * _MB), actor(30 * _MB, 5 * _MB)]
    advice = advise(assets, scene_slots=2, workers=2)
    assert advice.vram_least == (3 + 2) * 16 * _MB
    assert advice.vram_good == (3 + 2 + 2 + 3) * 16 * _MB
    assert advice.vram_plenty == (3 + 2 + 2 + 3 + 2) * 16 * _MB
    assert advice.ram_plenty == (3 + 1 + 2 + 3 + 2) * 15 * _MB
    assert advice.ram_least == (3 + 2 * 2) * 15 * _MB
    broken = AssetProfile(kind=Kind.SCENE, path="x", labels=1, problem="no such file")
    assert advise([scene(_MB), broken], scene_slots=5, workers=4) == advise([scene(_MB)], scene_slots=5, workers=4)


SIZES = st.integers(1, 1 << 36)


@given(st.lists(SIZES, max_size=8), st.lists(st.tuples(SIZES, SIZES), max_size=8), st.integers(1, 6), st.integers(1, 6))
def test_a_good_budget_is_at_least_the_minimum_and_the_minimum_fits_every_asset(
    scenes: list[int], actors: list[tuple[int, int]], slots: int, workers: int
) -> None:
    measured = [*map(scene, scenes), *(actor(max(pair), min(pair)) for pair in actors)]
    advice = advise(measured, scene_slots=slots, workers=workers)
    assert advice.vram_least <= advice.vram_good <= advice.vram_plenty
    assert advice.ram_least <= advice.ram_good <= advice.ram_plenty

    assets = [
        Asset(
            key=key_of(each.kind, str(number)),
            kind=each.kind,
            nbytes=each.vram_nbytes or 0,
            frame_nbytes=each.frame_nbytes or 0,
        )
        for number, each in enumerate(measured)
    ]
    vram, ram = advice.vram_least, advice.ram_least
    limits = limits_of(assets, Budgets(vram=vram, ram=ram, scene_slots=slots, working=vram // 16))
    rounded = PagePool(lambda nbytes: memoryview(bytearray(nbytes)), page_size(ram)).rounded
    assert [cannot_fit(asset, limits, rounded) for asset in assets] == [None] * len(assets)

    scene_ram = max((rounded(asset.nbytes) for asset in assets if asset.kind is Kind.SCENE), default=0)
    stream_ram = max((asset.stream_ram(rounded) for asset in assets if asset.kind is Kind.ACTOR), default=0)
    assert scene_ram + workers * stream_ram <= ram


@given(st.integers(0, 1 << 42))
def test_a_rounded_budget_is_never_below_the_exact_size(nbytes: int) -> None:
    assert parse_size(size_option(nbytes)) * _MB >= nbytes


def test_assets_are_listed_once_with_their_label_counts_and_scenes_first() -> None:
    labels = tuple(Label(name=str(number), value={}) for number in range(3))
    units = [
        Unit(actor="walk", labels=labels[:1]),
        Unit(scene="b", actor="walk", labels=labels[1:]),
        Unit(scene="a", labels=labels),
        Unit(scene="b", labels=labels[:1]),
    ]
    found = [(asset.kind, asset.path, asset.labels) for asset in assets_of(units)]
    assert found == [(Kind.SCENE, "b", 3), (Kind.SCENE, "a", 3), (Kind.ACTOR, "walk", 3)]
