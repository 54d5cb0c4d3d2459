"""Sizes and times of assets; an asset that cannot be measured has a problem."""

from pathlib import Path

from gpuyard.recipes.render.memory.leased_memory import Budget
from gpuyard.recipes.render.memory.read_asset_files import Loader
from gpuyard.recipes.render.planning.assets_and_units import Kind
from gpuyard.recipes.render.profile_assets import AssetProfile, Profiler
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


def test_an_asset_larger_than_ram_is_reported_with_its_size(tmp_path: Path) -> None:
    write_ply(tmp_path / "a.ply", splats(1000))
    (asset,) = measured(tmp_path, "a.ply", ram_mb=0.1)
    assert (asset.vram_nbytes, asset.load_s, asset.upload_s) == (NBYTES, None, None)
    assert "larger than the RAM budget" in str(asset.problem)


def test_an_asset_larger_than_vram_is_reported_with_its_measurements(tmp_path: Path) -> None:
    write_ply(tmp_path / "a.ply", splats(1000))
    (asset,) = measured(tmp_path, "a.ply", vram_mb=0.1)
    assert asset.load_s is not None
    assert asset.upload_s is None
    assert "full" in str(asset.problem)
