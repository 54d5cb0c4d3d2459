"""Reading at the start of a run: all threads read the asset that is needed first, so that rendering begins early."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from gpuyard.errors import AssetError
from gpuyard.recipes.render.memory import ply_file
from gpuyard.recipes.render.memory.asset_copies import PartReaders
from gpuyard.recipes.render.memory.named_arrays import Sink
from gpuyard.recipes.render.memory.ply_file import Ply
from tests.residency_files import PagedSink
from tests.residency_runs import DEADLINE_S, AssetFiles, checksum, tiers_over
from tests.unit.render.tiers.test_asset_tiers import content, take_scene

READERS = 4
SPLATS = 400
BUDGET = 1 << 20


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
    with mock.patch.object(Ply, "read_part", read_part), tiers_over([unit], vram=BUDGET, ram=BUDGET) as (tiers, _):
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
        while len(readers._waiting) < 8:
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
    with mock.patch.object(Ply, "read_part", read_part), tiers_over(units, vram=BUDGET, ram=BUDGET) as (tiers, _):
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
