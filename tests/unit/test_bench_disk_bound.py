"""The bound of the disk in the residency benchmark."""

import pytest

from bench.disk_bound import idle_s, work
from bench.residency_data import Shape
from gpuyard.recipes.render.planning.assets_and_units import Asset, Kind, Label, Unit

ASSETS = {
    key: Asset(key=key, kind=kind, nbytes=100)
    for key, kind in (("s1", Kind.SCENE), ("s2", Kind.SCENE), ("a", Kind.ACTOR))
}


def units(*scenes: str) -> list[Unit]:
    return [Unit(scene=scene, actor="a", labels=(Label(name="one", value=None),)) for scene in scenes]


def test_the_card_waits_while_the_next_asset_is_read() -> None:
    # The first unit is ready after 2 s and takes 0.4 s; the second scene is read after 3 s.
    assert idle_s(units("s1", "s2"), ASSETS, bytes_per_s=100.0, label_s=0.4) == pytest.approx(0.6)


def test_the_card_never_waits_for_what_was_read() -> None:
    assert idle_s(units("s1", "s1", "s1"), ASSETS, bytes_per_s=100.0, label_s=0.4) == 0.0
    assert idle_s(units("s1", "s2"), ASSETS, bytes_per_s=100.0, label_s=1.0) == 0.0


def test_the_benchmark_has_all_labels_and_reads_each_asset_once() -> None:
    shape = Shape()
    ordered, assets = work(shape)
    assert sum(len(unit.labels) for unit in ordered) == shape.labels
    assert sum(asset.nbytes for asset in assets.values()) == shape.nbytes
