"""Whole runs: the result of each label, its output, and its failures."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import UserError
from gpuyard.recipes.render.memory.read_asset_files import Loader, Source
from gpuyard.recipes.render.planning.assets_and_units import Unit
from gpuyard.residency import Coordinator
from gpuyard.ui.cli.recipes.render import VERB
from tests.residency_runs import (
    PAGE,
    AssetFiles,
    WatchedMemory,
    check_every_label,
    check_within_budgets,
    in_time,
    labels,
    names_of,
    opened,
    play,
    write_checksum,
)

ROOM = 1 << 20
SCENES, ACTORS = (40, 60, 80), ((200, 100), (270,) * 4)


@pytest.fixture(scope="module")
def asset_files(tmp_path_factory: pytest.TempPathFactory) -> AssetFiles:
    return AssetFiles(tmp_path_factory.mktemp("assets"), SCENES, ACTORS)


@pytest.fixture
def own_asset_files(tmp_path: Path) -> AssetFiles:
    """Assets that a test may damage."""
    return AssetFiles(tmp_path / "assets", SCENES, ACTORS)


# Rendered labels


def test_every_label_is_rendered_once_with_its_own_value(asset_files: AssetFiles, tmp_path: Path) -> None:
    units = asset_files.products(labels=2)
    rendered: Counter[str] = Counter()

    def render(scene: Any, frames: Any, label: Any, out_dir: Path) -> None:
        rendered[label["name"]] += 1
        assert list(out_dir.iterdir()) == []
        write_checksum(scene, frames, label, out_dir)

    played = play(units, tmp_path / "out", vram=ROOM, ram=ROOM, render=render)
    check_every_label(units, played, asset_files)
    check_within_budgets(played, ROOM, ROOM)
    assert rendered == Counter({label.name: 1 for unit in units for label in unit.labels})
    assert (played.skipped, played.status.state) == ({}, "finished")


def test_work_may_need_a_scene_alone_an_actor_alone_or_nothing(asset_files: AssetFiles, tmp_path: Path) -> None:
    units = [
        asset_files.unit(0, None),
        asset_files.unit(None, 0),
        asset_files.unit(None, None),
        asset_files.unit(1, 1, labels=0),
    ]
    played = play(units, tmp_path / "out", vram=ROOM, ram=ROOM)
    check_every_label(units, played, asset_files)
    assert not played.skipped


def test_a_run_without_units_succeeds(tmp_path: Path) -> None:
    played = play([], tmp_path / "out", vram=ROOM, ram=ROOM)
    assert (played.status.labels, played.status.state) == (0, "finished")


def test_one_file_may_be_a_scene_and_an_actor(asset_files: AssetFiles, tmp_path: Path) -> None:
    path = asset_files.scenes[0]
    units = [Unit(scene=path, actor=path, labels=labels("both")), Unit(scene=path, labels=labels("scene"))]
    played = play(units, tmp_path / "out", vram=ROOM, ram=ROOM)
    check_every_label(units, played, asset_files)
    assert not played.skipped
    assert played.status.moved.read_from_disk == 2 * asset_files.nbytes(path)


def test_streamed_and_resident_actors_give_the_same_output(asset_files: AssetFiles, tmp_path: Path) -> None:
    units = [asset_files.unit(None, 1, labels=2)]
    resident = play(units, tmp_path / "resident", vram=ROOM, ram=ROOM)
    from_ram = play(units, tmp_path / "ram", vram=10_000, ram=ROOM)
    from_disk = play(units, tmp_path / "disk", vram=10_000, ram=3 * PAGE)
    assert resident.outputs == from_ram.outputs == from_disk.outputs
    assert len(resident.outputs) == 2
    assert [each.status.counts.streams > 0 for each in (resident, from_ram, from_disk)] == [False, True, True]
    assert from_ram.status.moved.read_from_disk < from_disk.status.moved.read_from_disk


def test_the_given_order_is_kept_if_requested(asset_files: AssetFiles, tmp_path: Path) -> None:
    units = asset_files.products(seed=5)
    rendered: list[str] = []

    def render(*args: Any) -> None:
        rendered.append(args[2]["name"])

    play(units, tmp_path / "out", vram=ROOM, ram=ROOM, render=render, workers=1, order="manifest")
    assert rendered == [label.name for unit in units for label in unit.labels]


def test_two_labels_are_rendered_at_once_by_default(asset_files: AssetFiles, tmp_path: Path) -> None:
    """More threads launch fewer kernels: they wait for the interpreter and for the driver."""
    played = play(asset_files.products(seed=5), tmp_path / "out", vram=ROOM, ram=ROOM)
    assert len(played.status.workers) == 2
    assert {option.name: option.default for option in VERB.options}["workers"] == "2"


def test_changes_of_a_renderer_to_a_label_do_not_affect_the_next_try(asset_files: AssetFiles, tmp_path: Path) -> None:
    labels_seen = []

    def render(*args: Any) -> None:
        labels_seen.append(dict(args[2]))
        args[2]["name"] = "changed"
        if len(labels_seen) == 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    play([asset_files.unit(0, None)], tmp_path / "out", vram=ROOM, ram=ROOM, render=render)
    assert len(labels_seen) == 2
    assert labels_seen[0] == labels_seen[1]


# Skipped labels


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(b""), "scene1.ply"),
        (lambda path: os.truncate(path, 900), "scene1.ply"),
        (lambda path: path.write_bytes(b"not a ply file"), "scene1.ply"),
    ],
    ids=["missing", "empty", "truncated", "no ply"],
)
def test_labels_of_a_broken_asset_are_reported_and_the_rest_is_rendered(
    own_asset_files: AssetFiles, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    units = own_asset_files.products()
    damage(Path(own_asset_files.scenes[1]))
    played = play(units, tmp_path / "out", vram=ROOM, ram=ROOM)
    check_every_label(units, played, own_asset_files)
    assert played.skipped.keys() == names_of(unit for unit in units if unit.scene == own_asset_files.scenes[1])
    for skip in played.skipped.values():
        assert skip.kind == "asset"
        assert message in skip.reason
        assert skip.scene == own_asset_files.scenes[1]


class Breaking(Loader):
    """Delete a frame as soon as its sequence was measured."""

    def actor(self, path: str) -> Source:
        source = super().actor(path)
        (Path(path) / "frame2.ply").unlink(missing_ok=True)
        return source


@pytest.mark.parametrize("ram", [ROOM, 3 * PAGE], ids=["resident", "from disk"])
def test_an_asset_that_breaks_after_measuring_is_reported_and_the_rest_is_rendered(
    own_asset_files: AssetFiles, tmp_path: Path, ram: int
) -> None:
    units = [own_asset_files.unit(0, None), own_asset_files.unit(None, 1, labels=2), own_asset_files.unit(0, None)]
    played = play(units, tmp_path / "out", vram=ROOM, ram=ram, loader=Breaking())
    check_every_label(units, played, own_asset_files)
    assert played.skipped.keys() == names_of([units[1]])
    assert {skip.kind for skip in played.skipped.values()} == {"asset"}
    assert all("frame2.ply" in skip.reason for skip in played.skipped.values())


def test_a_unit_that_does_not_fit_beside_others_is_rendered_alone_at_the_end(
    asset_files: AssetFiles, tmp_path: Path
) -> None:
    """Two frames of the large actor and the largest scene are more than the device has; each by itself is not."""
    units = [asset_files.unit(2, None), asset_files.unit(None, 1), asset_files.unit(0, 0)]
    vram = asset_files.nbytes(asset_files.scenes[2]) + 64
    played = play(units, tmp_path / "out", vram=vram, ram=ROOM)
    check_every_label(units, played, asset_files)
    check_within_budgets(played, vram, ROOM)
    assert not played.skipped


# Refused runs


def test_two_labels_with_one_name_are_refused_before_anything_is_rendered(
    asset_files: AssetFiles, tmp_path: Path
) -> None:
    units = [
        Unit(scene=asset_files.scenes[0], labels=labels("a", "b")),
        Unit(scene=asset_files.scenes[1], labels=labels("b")),
    ]
    with pytest.raises(UserError, match="two labels are named 'b'"):
        play(units, tmp_path / "out", vram=ROOM, ram=ROOM)
    assert not (tmp_path / "out").exists()


def test_a_coordinator_that_is_not_open_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not open"):
        Coordinator(vram=1, ram=1).run([], write_checksum, tmp_path)


def test_a_coordinator_can_run_several_times(asset_files: AssetFiles, tmp_path: Path) -> None:
    with opened(WatchedMemory(ROOM), [], vram=1, ram=1) as coordinator:
        for number in range(2):
            units = [asset_files.unit(number, 0)]
            report = in_time(
                lambda units=units, number=number: coordinator.run(units, write_checksum, tmp_path / str(number)),  # type: ignore[misc]
                coordinator.stop,
            )
            assert (report.status.rendered, report.skipped) == (1, ())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vram": 0}, "vram is 0"),
        ({"vram": -1}, "vram is -1"),
        ({"vram": float("nan")}, "vram is nan"),
        ({"ram": "0"}, "ram is 0"),
        ({"actor_budget": 0}, "actor_budget is 0"),
        ({"scene_slots": 0}, "scene_slots is 0"),
        ({"workers": 0}, "workers is 0"),
        ({"order": "best"}, "order is 'best'"),
        ({"vram": "44 gigs"}, "44 gigs"),
    ],
)
def test_invalid_settings_are_refused_with_their_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Coordinator(**{"vram": "1G", "ram": "1G", **settings})
    assert message in caught.value.message
