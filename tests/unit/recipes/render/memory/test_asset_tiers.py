"""The tiers: copies stay while they are lent, and waiting workers get an asset or an error."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from gpuyard.errors import AssetError, DeviceFull
from gpuyard.recipes.render.memory import ply_file
from gpuyard.recipes.render.memory.asset_copies import Loan, PartReaders, TiersStopped, TooLarge
from gpuyard.recipes.render.memory.asset_tiers import Tiers
from gpuyard.recipes.render.memory.assets_in_use import retry_with_less
from gpuyard.recipes.render.memory.named_arrays import Arrays, Sink
from gpuyard.recipes.render.memory.ply_file import Ply
from gpuyard.recipes.render.memory.read_asset_files import Loader
from gpuyard.recipes.render.planning.assets_and_units import Kind, Unit
from tests.residency_files import PagedSink
from tests.residency_runs import DEADLINE_S, AssetFiles, WatchedMemory, checksum, in_time, tiers_over

ROOM = 1 << 20
LATE_S = 10.0


@pytest.fixture(scope="module")
def asset_files(tmp_path_factory: pytest.TempPathFactory) -> AssetFiles:
    return AssetFiles(tmp_path_factory.mktemp("assets"), (40, 50, 60, 70), ((300, 200), (250,) * 4))


@pytest.fixture
def in_thread() -> Iterator[Callable[..., "Future[Loan]"]]:
    """Return a function that runs a call in another thread."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def begin(tiers: Tiers) -> tuple[int, Unit]:
    handed = tiers.next_unit()
    assert handed is not None
    return handed


def take_scene(tiers: Tiers) -> Loan:
    number, unit = begin(tiers)
    assert unit.scene is not None
    scene = unit.scene
    return in_time(lambda: tiers.take(scene, number), tiers.stop)


def content(tiers: Tiers, loan: Loan) -> str:
    copies = loan.copies
    return checksum(Arrays(tiers.memory, copies.buffer, layout, "") for layout in copies.layouts)


def test_a_taken_asset_is_in_vram(asset_files: AssetFiles) -> None:
    units = [asset_files.unit(0, 0)]
    with tiers_over(units, vram=ROOM, ram=ROOM) as (tiers, _):
        number, unit = begin(tiers)
        assert unit.scene is not None
        assert unit.actor is not None
        loans = [tiers.take(unit.scene, number), tiers.take(unit.actor, number)]
        assert not any(loan.is_streamed for loan in loans)
        assert content(tiers, loans[0]) == asset_files.right(Unit(scene=asset_files.scenes[0], labels=()))
        assert content(tiers, loans[1]) == asset_files.right(Unit(actor=asset_files.actors[0], labels=()))
        assert tiers.vram_nbytes() == sum(loan.copies.asset.nbytes for loan in loans)
        for loan in loans:
            tiers.give_back(loan)
        assert tiers.next_unit() is None


def test_a_scene_is_lent_to_several_workers_and_uploaded_once(asset_files: AssetFiles) -> None:
    with tiers_over([asset_files.unit(0, None), asset_files.unit(0, None)], vram=ROOM, ram=ROOM) as (tiers, _):
        first, second = take_scene(tiers), take_scene(tiers)
        assert first.copies.buffer is second.copies.buffer
        tiers.give_back(first)
        assert content(tiers, second) == asset_files.right(Unit(scene=asset_files.scenes[0], labels=()))
        assert tiers.counts.moved.uploaded == first.copies.asset.nbytes
        figures = tiers.counts.counts
        assert figures.misses + figures.ram_hits + figures.vram_hits == 2
        assert figures.vram_hits >= 1
        tiers.give_back(second)


def test_a_worker_that_finds_all_slots_in_use_gets_the_next_free_slot(
    asset_files: AssetFiles, in_thread: Callable[..., "Future[Loan]"]
) -> None:
    with tiers_over([asset_files.unit(number, None) for number in range(3)], vram=ROOM, ram=ROOM) as (tiers, _):
        loans = [take_scene(tiers), take_scene(tiers)]
        waiting = in_thread(take_scene, tiers)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.2)
        assert set(tiers.paths_in(Kind.SCENE)) == set(asset_files.scenes[:2])
        tiers.give_back(loans[0])
        served = waiting.result(LATE_S)
        assert content(tiers, served) == asset_files.right(Unit(scene=asset_files.scenes[2], labels=()))
        assert content(tiers, loans[1]) == asset_files.right(Unit(scene=asset_files.scenes[1], labels=()))
        assert tiers.counts.stalls_s["slot"] > 0
        for loan in (loans[1], served):
            tiers.give_back(loan)


def test_a_waiting_worker_gets_nothing_when_the_run_is_stopped(
    asset_files: AssetFiles, in_thread: Callable[..., "Future[Loan]"]
) -> None:
    with tiers_over([asset_files.unit(number, None) for number in range(3)], vram=ROOM, ram=ROOM) as (tiers, _):
        loans = [take_scene(tiers), take_scene(tiers)]
        waiting = in_thread(take_scene, tiers)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.1)
        tiers.stop()
        with pytest.raises(TiersStopped):
            waiting.result(LATE_S)
        assert tiers.next_unit() is None
        for loan in loans:
            tiers.give_back(loan)


def test_an_upload_without_memory_is_reported_and_tried_again_on_request(asset_files: AssetFiles) -> None:
    # The first upload may fail before a worker waits for it, and is tried again then.
    memory = WatchedMemory(ROOM, lambda number, _: DeviceFull("full") if number <= 2 else None)
    with tiers_over([asset_files.unit(0, None)], vram=ROOM, ram=ROOM, memory=memory) as (tiers, _):
        number, unit = begin(tiers)
        assert unit.scene is not None
        with pytest.raises(DeviceFull):
            tiers.take(unit.scene, number)
        while memory.allocations < 2:
            with pytest.raises(DeviceFull):
                tiers.take(unit.scene, number)
        tiers.give_back(tiers.take(unit.scene, number))


def test_out_of_memory_drops_idle_actors_then_one_idle_scene_and_nothing_in_use(asset_files: AssetFiles) -> None:
    units = [asset_files.unit(0, 0), asset_files.unit(1, 0), asset_files.unit(1, None), asset_files.unit(0, 0)]
    with tiers_over(units, vram=ROOM, ram=ROOM) as (tiers, _):
        number, unit = begin(tiers)
        assert unit.scene is not None
        assert unit.actor is not None
        for key in (unit.scene, unit.actor):
            tiers.give_back(tiers.take(key, number))
        kept = take_scene(tiers)
        present: list[tuple[set[str], int]] = []

        def act() -> None:
            present.append((set(tiers.paths_in(Kind.SCENE)), len(tiers.paths_in(Kind.ACTOR))))
            raise DeviceFull("still full")

        with pytest.raises(DeviceFull, match="still full"):
            retry_with_less(tiers, act)
        both, in_use = set(asset_files.scenes[:2]), {asset_files.scenes[1]}
        assert present == [(both, 1), (both, 0), (in_use, 0)]
        tiers.give_back(kept)


def test_other_errors_than_out_of_memory_are_not_retried(asset_files: AssetFiles) -> None:
    with tiers_over([asset_files.unit(0, None)], vram=ROOM, ram=ROOM) as (tiers, _):
        calls = []

        def act() -> None:
            calls.append(1)
            raise RuntimeError("a mistake")

        with pytest.raises(RuntimeError, match="a mistake"):
            retry_with_less(tiers, act)
        assert len(calls) == 1


# Estimates


def loader_of(nbytes: dict[str, int]) -> Loader:
    """Return a loader that cannot know the size in memory from the file."""
    return Loader(lambda path: {"x": np.arange(nbytes[Path(path).name], dtype="u1")})


def files(root: Path, sizes: dict[str, int]) -> list[str]:
    for name, size in sizes.items():
        (root / name).write_bytes(b"." * size)
    return [str(root / name) for name in sizes]


@pytest.mark.parametrize(("on_disk", "in_memory"), [(1_000, 50_000), (50_000, 1_000), (5_000, 5_000)])
def test_an_estimate_may_be_wrong_if_memory_suffices(tmp_path: Path, on_disk: int, in_memory: int) -> None:
    (path,) = files(tmp_path, {"a": on_disk})
    units = [Unit(scene=path, labels=())] * 2
    with tiers_over(units, vram=ROOM, ram=ROOM, loader=loader_of({"a": in_memory})) as (tiers, _):
        loan = take_scene(tiers)
        assert content(tiers, loan) == checksum([{"x": np.arange(in_memory, dtype="u1")}])
        assert tiers.vram_nbytes() == loan.copies.asset.nbytes == -(-in_memory // 16) * 16
        tiers.give_back(loan)


def test_an_asset_that_turns_out_too_large_is_reported_and_not_waited_for(tmp_path: Path) -> None:
    first, second = files(tmp_path, {"a": 100, "b": 100})
    units = [Unit(scene=first, labels=()), Unit(scene=second, labels=())]
    with tiers_over(units, vram=40_000, ram=ROOM, loader=loader_of({"a": 50_000, "b": 500})) as (tiers, _):
        with pytest.raises(TooLarge, match="is larger than"):
            take_scene(tiers)
        tiers.give_back(take_scene(tiers))


def test_a_scene_that_no_longer_fits_beside_an_actor_is_reported(
    tmp_path: Path, in_thread: Callable[..., "Future[Loan]"]
) -> None:
    """The actor's frames turn out larger: the memory kept for its stream grows, and the scene no longer fits."""
    (tmp_path / "actor").mkdir()
    frames = [f"f{number}" for number in range(4)]
    files(tmp_path / "actor", dict.fromkeys(frames, 2_000))
    (scene,) = files(tmp_path, {"s": 30_000})
    sizes = {"s": 30_000, **dict.fromkeys(frames, 20_000)}
    units = [Unit(actor=str(tmp_path / "actor"), labels=()), Unit(scene=scene, labels=())]
    with tiers_over(units, vram=60_000, ram=ROOM, loader=loader_of(sizes)) as (tiers, _):
        number, unit = begin(tiers)
        assert unit.actor is not None
        loan = in_thread(tiers.take, unit.actor, number).result(LATE_S)
        assert loan.is_streamed
        with pytest.raises(TooLarge):
            in_thread(take_scene, tiers).result(LATE_S)
        tiers.give_back(loan)


def test_other_workers_do_not_wait_while_the_renderers_memory_is_measured(
    asset_files: AssetFiles, in_thread: Callable[..., "Future[int]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every label. PyTorch counts its memory under locks of its own."""
    with tiers_over([asset_files.unit(0, None)], vram=ROOM, ram=ROOM) as (tiers, _):
        answers: list[int] = []

        def peak() -> int:
            answers.append(in_thread(tiers.vram_nbytes).result(LATE_S))
            return 0

        monkeypatch.setattr(tiers.memory, "peak", peak)
        tiers.reserve_working()
        assert answers == [0]


def test_memory_that_the_renderer_used_is_kept_free_for_it(asset_files: AssetFiles) -> None:
    units = [asset_files.unit(0, None), asset_files.unit(1, None)]
    with tiers_over(units, vram=ROOM, ram=ROOM) as (tiers, _):
        loan = take_scene(tiers)
        own = tiers.memory.allocate(100_000)
        tiers.reserve_working()
        tiers.memory.free(own)
        assert 0 < tiers.budgets.working <= 100_000
        largest = max(map(asset_files.nbytes, asset_files.scenes[:2]))
        too_much = tiers.memory.allocate(ROOM - tiers.memory.used())
        tiers.reserve_working()
        tiers.memory.free(too_much)
        assert tiers.budgets.vram_for_assets >= largest
        tiers.give_back(loan)
        tiers.give_back(take_scene(tiers))


READERS = 4
SPLATS = 400


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files in parts of 100 splats."""
    monkeypatch.setattr(ply_file, "PART_NBYTES", 100 * 248)


@pytest.mark.usefixtures("parts")
def test_all_threads_read_the_asset_that_is_needed_first(tmp_path: Path) -> None:
    asset_files = AssetFiles(tmp_path, [SPLATS], [])
    unit = asset_files.unit(0, None)
    all_read = threading.Barrier(READERS)

    def read_part(ply: Ply, rows: range, sink: Sink, offset: int = 0) -> None:
        all_read.wait(DEADLINE_S)  # broken, and so an error, unless four threads read one file
        plain(ply, rows, sink, offset)

    plain = Ply.read_part
    with mock.patch.object(Ply, "read_part", read_part), tiers_over([unit], vram=ROOM, ram=ROOM) as (tiers, _):
        loan = take_scene(tiers)
        assert content(tiers, loan) == asset_files.right(unit)
        tiers.give_back(loan)


def test_the_parts_of_the_asset_that_is_needed_first_go_first() -> None:
    """With all assets read at the same speed, the first label would wait for all of them."""
    readers = PartReaders(1)
    is_reading = threading.Event()
    read: list[str] = []

    def first_part() -> None:
        """Read until all other parts wait."""
        is_reading.set()
        deadline = time.monotonic() + DEADLINE_S
        while readers._waiting.qsize() < 8:
            assert time.monotonic() < deadline
        read.append("third 0")

    def parts_of(name: str, numbers: range) -> list[Callable[[], object]]:
        return [partial(read.append, f"{name} {number}") for number in numbers]

    with ThreadPoolExecutor(3) as pool:
        reads = [pool.submit(readers.call_all, 5, [first_part, *parts_of("third", range(1, 3))])]
        assert is_reading.wait(DEADLINE_S)
        for place, name in ((3, "second"), (2, "first")):
            reads.append(pool.submit(readers.call_all, place, parts_of(name, range(3))))
    readers.close()

    assert [one.result() for one in reads] == [None] * 3
    first, second = ([f"{name} {number}" for number in range(3)] for name in ("first", "second"))
    assert read == ["third 0", *first, *second, "third 1", "third 2"]


@pytest.mark.usefixtures("parts")
def test_a_part_that_cannot_be_read_breaks_the_asset_and_no_other(tmp_path: Path) -> None:
    asset_files = AssetFiles(tmp_path, [SPLATS, SPLATS], [])
    units = [asset_files.unit(0, None), asset_files.unit(1, None)]

    def read_part(ply: Ply, rows: range, sink: Sink, offset: int = 0) -> None:
        if ply.path == asset_files.scenes[0] and rows.start:
            raise AssetError(ply.path, "it ends before its last vertex")
        plain(ply, rows, sink, offset)

    plain = Ply.read_part
    with mock.patch.object(Ply, "read_part", read_part), tiers_over(units, vram=ROOM, ram=ROOM) as (tiers, _):
        with pytest.raises(AssetError, match="it ends before"):
            take_scene(tiers)
        loan = take_scene(tiers)
        assert content(tiers, loan) == asset_files.right(units[1])
        tiers.give_back(loan)


@pytest.mark.usefixtures("parts")
def test_parts_in_any_order_give_the_bytes_of_the_whole(tmp_path: Path) -> None:
    ply = ply_file.describe(AssetFiles(tmp_path, [SPLATS + 7], []).scenes[0])
    whole, reverse = PagedSink(ply.nbytes, 37), PagedSink(ply.nbytes, 41)
    ply.read(whole)
    for part in reversed(ply.parts()):
        ply.read_part(part, reverse)
    assert len(ply.parts()) == 5
    assert checksum([whole.arrays(ply.layout())]) == checksum([reverse.arrays(ply.layout())])
