"""Runs over small assets with real threads on a simulated device, and the checks that every run must pass.

The renderer of these runs writes a checksum of the bytes it was given, so an output is right only if the right asset
was complete and in its place.
"""

import contextlib
import faulthandler
import random
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import msgspec
import numpy as np
import pytest

from gpuyard.recipes.render import coordinator
from gpuyard.recipes.render.coordinator import Coordinator
from gpuyard.recipes.render.memory.asset_copies import Copies
from gpuyard.recipes.render.memory.asset_tiers import Tiers
from gpuyard.recipes.render.memory.device_memory import DeviceMemory, PagePool, Pages
from gpuyard.recipes.render.memory.host_memory import Bytes, HostMemory
from gpuyard.recipes.render.memory.read_asset_files import Loader
from gpuyard.recipes.render.planning.assets_and_units import (
    Asset,
    Budgets,
    Future,
    Kind,
    Label,
    Unit,
    key_of,
    keys_of,
    parts_of,
)
from gpuyard.recipes.render.status_file import RenderReport, RenderStatus, Skip
from tests.residency_files import Table, points, splats, write_ply

MB = 1048576
PAGE = 4096
DEADLINE_S = 30.0
OUTPUT = "checksum"

T = TypeVar("T")


# Assets


def checksum(parts: Iterable[Mapping[str, Any]]) -> str:
    """Return a checksum over each array's name and bytes."""
    total = 0
    for part in parts:
        for name in sorted(part):
            total = zlib.crc32(np.ascontiguousarray(part[name]).tobytes(), zlib.crc32(name.encode(), total))
    return f"{total:08x}"


def columns_of(table: Table) -> dict[str, Any]:
    return {name: table[name] for name in table.dtype.names or ()}


class AssetFiles:
    """Scenes and actors on disk, each in several sizes, and the expected output of a unit."""

    def __init__(self, root: Path, scenes: Sequence[int], actors: Sequence[Sequence[int]]) -> None:
        """`scenes`: splats per scene. `actors`: points per frame, for each actor."""
        root.mkdir(parents=True, exist_ok=True)
        self._parts: dict[str, list[dict[str, Any]]] = {}
        self.scenes = [self._scene(root / f"scene{n}.ply", splats(count, n)) for n, count in enumerate(scenes)]
        self.actors = [self._actor(root / f"actor{n}", n, counts) for n, counts in enumerate(actors)]
        self._labels = 0

    def _scene(self, path: Path, table: Table) -> str:
        self._parts[str(path)] = [columns_of(table)]
        return str(write_ply(path, table))

    def _actor(self, path: Path, number: int, counts: Sequence[int]) -> str:
        path.mkdir()
        tables = [points(count, 100 * number + place) for place, count in enumerate(counts)]
        for place, table in enumerate(tables):
            write_ply(path / f"frame{place}.ply", table)
        self._parts[str(path)] = [columns_of(table) for table in tables]
        return str(path)

    def unit(self, scene: int | None, actor: int | None, labels: int = 1) -> Unit:
        names = [f"label{self._labels + number}" for number in range(labels)]
        self._labels += labels
        return Unit(
            scene=None if scene is None else self.scenes[scene],
            actor=None if actor is None else self.actors[actor],
            labels=tuple(Label(name=name, value={"name": name}) for name in names),
        )

    def right(self, unit: Unit) -> str:
        parts = [self._parts[path] for path in (unit.scene, unit.actor) if path is not None]
        return checksum(part for each in parts for part in each)

    def nbytes(self, path: str | None) -> int:
        """Return its size in memory, where each array of points is aligned separately."""
        return 0 if path is None else sum(array.nbytes for part in self._parts[path] for array in part.values())

    def products(self, labels: int = 1, seed: int = 0) -> list[Unit]:
        """Every scene with every actor, shuffled."""
        pairs = [(scene, actor) for scene in range(len(self.scenes)) for actor in range(len(self.actors))]
        random.Random(seed).shuffle(pairs)
        return [self.unit(scene, actor, labels) for scene, actor in pairs]


def labels(*names: str) -> tuple[Label, ...]:
    return tuple(Label(name=name, value={"name": name}) for name in names)


def names_of(units: Iterable[Unit]) -> set[str]:
    return {label.name for unit in units for label in unit.labels}


def write_checksum(scene: Any, frames: Any, label: Any, out_dir: Path) -> None:
    parts = [] if scene is None else [scene]
    (out_dir / OUTPUT).write_text(checksum([*parts, *frames]))


# The machine


class WatchedMemory(HostMemory):
    """Count allocations and refusals. `fails(number, nbytes)` returns the exception an allocation raises, or None."""

    def __init__(
        self, nbytes: int, fails: Callable[[int, int], Exception | None] = lambda number, nbytes: None
    ) -> None:
        super().__init__(nbytes)
        self._fails = fails
        self._counting = threading.Lock()
        self.allocations = self.refusals = self.live = 0

    def allocate(self, nbytes: int) -> Bytes:
        with self._counting:
            self.allocations += 1
            error = self._fails(self.allocations, nbytes)
        if error is not None:
            raise error
        with self._counting:
            self.refusals += 1
        buffer = super().allocate(nbytes)
        with self._counting:
            self.refusals -= 1
            self.live += 1
        return buffer

    def free(self, buffer: Bytes) -> None:
        super().free(buffer)
        # A reader that still uses it gets garbage.
        buffer[:] = 0xEE
        with self._counting:
            self.live -= 1


class WatchedPool(PagePool):
    """Record the most bytes of pages that were in use at a time."""

    def __init__(self, make: Callable[[int], memoryview], size: int) -> None:
        super().__init__(make, size)
        self._counting = threading.Lock()
        self.in_use = self.peak = 0

    def take(self, nbytes: int) -> Pages:
        with self._counting:
            self.in_use += self.rounded(nbytes)
            self.peak = max(self.peak, self.in_use)
        return super().take(nbytes)

    def give_back(self, blob: Pages) -> None:
        for page in blob.pages:
            np.frombuffer(page, np.uint8)[:] = 0xDD
        super().give_back(blob)
        with self._counting:
            self.in_use -= self.rounded(blob.nbytes)


@contextlib.contextmanager
def opened(memory: DeviceMemory, pools: list[WatchedPool], **settings: Any) -> Iterator[Coordinator]:
    """Yield a coordinator on this memory."""

    def device(*_: object, **__: object) -> contextlib.AbstractContextManager[DeviceMemory]:
        return contextlib.nullcontext(memory)

    def pool(make: Callable[[int], memoryview], size: int) -> WatchedPool:
        pools.append(WatchedPool(make, size))
        return pools[-1]

    with (
        mock.patch.object(coordinator, "open_device", device),
        mock.patch.object(coordinator, "PagePool", pool),
        Coordinator(device="host", **settings) as opened,
    ):
        yield opened


def in_time(act: Callable[[], T], stop: Callable[[], None]) -> T:
    """Return the result of `act`. If it does not end in time, print every thread's stack and fail."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if thread.is_alive():
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        stop()
        thread.join(DEADLINE_S)
        pytest.fail(f"it did not end in {DEADLINE_S:g} s")
    if errors:
        raise errors[0]
    return results[0]


# A run


@dataclass(kw_only=True)
class Played:
    report: RenderReport
    outputs: dict[str, str]
    skipped: dict[str, Skip]
    memory: WatchedMemory
    pool: WatchedPool

    @property
    def status(self) -> RenderStatus:
        return self.report.status


def play(
    units: Sequence[Unit],
    out: Path,
    *,
    vram: int,
    ram: int,
    memory: WatchedMemory | None = None,
    render: Callable[..., object] = write_checksum,
    resume: bool = False,
    loader: Loader | None = None,
    working: int | None = 0,
    **settings: Any,
) -> Played:
    """Render `units` within these budgets, in bytes."""
    memory, pools = memory or WatchedMemory(vram), list[WatchedPool]()
    budgets = {"vram": vram / MB, "ram": ram / MB, "working": None if working is None else working / MB}
    with opened(memory, pools, loader=loader, **budgets, **settings) as opened_:
        report = in_time(lambda: opened_.run(units, render, out, resume=resume), opened_.stop)
    return Played(report=report, outputs=outputs_in(out), skipped=skipped_in(out), memory=memory, pool=pools[0])


def outputs_in(out: Path) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in out.glob(f"*/{OUTPUT}")}


def skipped_in(out: Path) -> dict[str, Skip]:
    """Return the skipped labels; each has at most one line."""
    path = out / "skipped.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    skips = [msgspec.json.decode(line, type=Skip) for line in lines]
    assert len({skip.label for skip in skips}) == len(skips)
    return {skip.label: skip for skip in skips}


def check_every_label(units: Iterable[Unit], played: Played, asset_files: AssetFiles) -> None:
    """Check that every label was rendered right or reported as skipped, and that no temporary file is left."""
    right = {label.name: asset_files.right(unit) for unit in units for label in unit.labels}
    assert played.outputs.keys().isdisjoint(played.skipped)
    assert played.outputs.keys() | played.skipped.keys() == right.keys()
    assert played.outputs == {name: right[name] for name in played.outputs}
    assert {skip.label for skip in played.report.skipped} == played.skipped.keys()
    status = played.status
    assert (status.labels, status.rendered + status.already, status.skipped) == (
        len(right),
        len(played.outputs),
        len(played.skipped),
    )
    assert (played.memory.used(), played.memory.live, played.pool.in_use) == (0, 0, 0)


def check_within_budgets(played: Played, vram: int, ram: int) -> None:
    assert played.memory.peak() <= vram
    assert played.memory.refusals == 0
    assert played.pool.peak <= ram
    assert played.status.vram.peak_assets <= vram
    assert played.status.ram.peak_assets <= ram


# The tiers alone


@contextlib.contextmanager
def tiers_over(
    units: Sequence[Unit], *, vram: int, ram: int, memory: WatchedMemory | None = None, loader: Loader | None = None
) -> Iterator[tuple[Tiers, WatchedPool]]:
    """Yield tiers for units in the order of the manifest, with two slots for scenes."""
    memory, loader = memory or WatchedMemory(vram), loader or Loader()
    pool = WatchedPool(memory.page, PAGE)
    keyed = [with_keys(unit) for unit in units]
    copies = {key: _copies(key, loader, memory, pool) for unit in keyed for key in keys_of(unit)}
    tiers = Tiers(memory, Budgets(vram=vram, ram=ram, scene_slots=2), copies, Future(keyed), rounded=pool.rounded)
    try:
        yield tiers, pool
    finally:
        tiers.close()
        assert (memory.live, pool.in_use) == (0, 0)


def with_keys(unit: Unit) -> Unit:
    scene = None if unit.scene is None else key_of(Kind.SCENE, unit.scene)
    actor = None if unit.actor is None else key_of(Kind.ACTOR, unit.actor)
    return Unit(scene=scene, actor=actor, labels=unit.labels)


def _copies(key: str, loader: Loader, memory: DeviceMemory, pool: PagePool) -> Copies:
    kind, path = parts_of(key)
    source = loader.scene(path) if kind is Kind.SCENE else loader.actor(path)
    asset = Asset(key=key, kind=kind, nbytes=source.nbytes, frame_nbytes=source.frame_nbytes)
    return Copies(asset, source, memory, pool)
