"""Measure the size of every asset of a manifest on disk, in RAM and in VRAM, and the time to load and upload it, as in
a run. An asset that cannot be measured has a `problem`. The measurements give the recommended budgets."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from gpuyard.errors import AssetError, DeviceFull, EnvironmentFault
from gpuyard.model.units import MB
from gpuyard.recipes.render.memory.device_memory import DeviceMemory, PagePool, Pages, page_size
from gpuyard.recipes.render.memory.leased_memory import Budget, open_device
from gpuyard.recipes.render.memory.read_asset_files import Loader, Source
from gpuyard.recipes.render.planning.assets_and_units import WORKING_PART, Asset, Kind, Unit

OVERHEAD_NBYTES = 64 * MB  # memory of a GPU's allocator beside a buffer


class AssetProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of an asset, sizes in bytes; None if not measured, and then `problem` is the reason."""

    kind: Kind
    path: str
    labels: int
    frames: int | None = None
    disk_nbytes: int | None = None
    ram_nbytes: int | None = None  # without the rest of its last page
    vram_nbytes: int | None = None
    frame_nbytes: int | None = None
    load_s: float | None = None
    upload_s: float | None = None
    problem: str | None = None


def assets_of(units: Iterable[Unit]) -> list[AssetProfile]:
    """Return scenes, then actors, in the order of first use, each with the number of labels that use it."""
    labels: Counter[tuple[Kind, str]] = Counter()
    for unit in units:
        for kind, path in ((Kind.SCENE, unit.scene), (Kind.ACTOR, unit.actor)):
            if path is not None:
                labels[kind, path] += len(unit.labels)
    found = [AssetProfile(kind=kind, path=path, labels=count) for (kind, path), count in labels.items()]
    return sorted(found, key=lambda asset: asset.kind is Kind.ACTOR)


class Profiler:
    """Measures assets on a device. `name` is the device's name, None before the first measurement."""

    def __init__(self, loader: Loader, device: str, vram: Budget, ram: Budget) -> None:
        self._loader, self._device = loader, device
        self._vram, self._ram = int(vram.mb * MB), int(ram.mb * MB)
        self.name: str | None = None

    def measure(self, assets: Sequence[AssetProfile]) -> Iterator[AssetProfile]:
        found = [self._describe(asset) for asset in assets]
        # VRAM for the largest asset only, so that other programs can use the rest meanwhile.
        known = [source for _, source in found if source is not None]
        # A loader may decompress a file to four times the estimate.
        most = max((source.nbytes * (1 if source.is_exact else 4) for source in known), default=0)
        with open_device(min(self._vram, most + OVERHEAD_NBYTES), self._device, label="profile") as memory:
            self.name = memory.name
            pool = PagePool(memory.page, page_size(self._ram))
            # Upload once before measuring, because the first copy includes the device's setup.
            pages = pool.take(pool.size)
            _upload(AssetProfile(kind=Kind.SCENE, path="", labels=0), pages, memory)
            pool.give_back(pages)
            for asset, source in found:
                yield asset if source is None else self._measure_one(asset, source, memory, pool)

    def _describe(self, asset: AssetProfile) -> tuple[AssetProfile, Source | None]:
        try:
            source = self._loader.scene(asset.path) if asset.kind is Kind.SCENE else self._loader.actor(asset.path)
        except AssetError as error:
            return msgspec.structs.replace(asset, problem=error.message), None
        sizes = {"vram_nbytes": source.nbytes, "frame_nbytes": source.frame_nbytes} if source.is_exact else {}
        known = msgspec.structs.replace(asset, frames=source.frames, disk_nbytes=source.disk_nbytes, **sizes)
        return known, source

    def _measure_one(self, asset: AssetProfile, source: Source, memory: DeviceMemory, pool: PagePool) -> AssetProfile:
        """Read and upload one asset. The time to allocate pages does not count, because a run does it only once."""
        taken: list[Pages] = []
        allocation_s = 0.0

        def allocate(nbytes: int) -> Pages:
            nonlocal allocation_s
            if nbytes > self._ram:
                raise AssetError(asset.path, "it is larger than the RAM budget")
            before = time.monotonic()
            taken.append(pool.take(nbytes))
            allocation_s += time.monotonic() - before
            return taken[-1]

        try:
            started = time.monotonic()
            layouts = source.read(allocate)
            load_s = time.monotonic() - started - allocation_s
            nbytes, frame_nbytes = taken[0].nbytes, max(layout.nbytes for layout in layouts)
            sizes = {"ram_nbytes": nbytes, "vram_nbytes": nbytes, "frame_nbytes": frame_nbytes}
            asset = msgspec.structs.replace(asset, load_s=load_s, **sizes)
            return _upload(asset, taken[0], memory)
        except EnvironmentFault as error:
            return msgspec.structs.replace(asset, problem=error.message)
        finally:
            for pages in taken:
                pool.give_back(pages)


def _upload(asset: AssetProfile, pages: Pages, memory: DeviceMemory) -> AssetProfile:
    try:
        buffer = memory.allocate(pages.nbytes)
    except DeviceFull as error:
        return msgspec.structs.replace(asset, problem=error.message)
    try:
        started = time.monotonic()
        memory.upload(pages.views(0, pages.nbytes), buffer)
        return msgspec.structs.replace(asset, upload_s=time.monotonic() - started)
    finally:
        memory.free(buffer)


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Budgets in bytes. `least` is the minimum; with `good`, workers rarely wait; more than `plenty` helps little."""

    vram_least: int
    vram_good: int
    vram_plenty: int
    ram_least: int
    ram_good: int
    ram_plenty: int


def advise(assets: Sequence[AssetProfile], *, scene_slots: int, workers: int, overhead: int = 0) -> Advice:
    """Return the budgets. `overhead` is memory of the device's own allocator. Assets of unknown size are left out."""
    scenes, actors = _assets(assets, Kind.SCENE), _assets(assets, Kind.ACTOR)
    stream = max((actor.stream_nbytes for actor in actors), default=0)

    def vram(scene_count: int, actor_count: int) -> int:
        chosen = scenes[:scene_count] + actors[:actor_count]
        return math.ceil((stream + sum(asset.nbytes for asset in chosen)) / (1 - 1 / WORKING_PART)) + overhead

    # Larger than any budget below, so that pages of the actual budget are not larger than this.
    page = page_size(2 * (sum(asset.nbytes for asset in scenes + actors) + workers * stream))

    def rounded(nbytes: int) -> int:
        return -(-nbytes // page) * page

    def ram(scene_count: int, actor_count: int) -> int:
        return sum(rounded(asset.nbytes) for asset in scenes[:scene_count] + actors[:actor_count])

    # Each worker needs this to stream an actor from disk that does not fit into RAM.
    ram_least = ram(1, 0) + workers * max((actor.stream_ram(rounded) for actor in actors), default=0)
    return Advice(
        vram_least=vram(1, 0),
        vram_good=vram(scene_slots, 1),
        vram_plenty=vram(scene_slots, workers),
        ram_least=ram_least,
        ram_good=max(ram_least, ram(scene_slots + 1, workers + 1)),
        ram_plenty=max(ram_least, ram(len(scenes), len(actors))),
    )


def size_option(nbytes: int) -> str:
    return f"{math.ceil(nbytes / (1024 * MB))}G" if nbytes >= 4 * 1024 * MB else f"{math.ceil(nbytes / MB)}M"


def _assets(measured: Sequence[AssetProfile], kind: Kind) -> list[Asset]:
    known = [
        Asset(key=each.path, kind=kind, nbytes=each.vram_nbytes, frame_nbytes=each.frame_nbytes or 0)
        for each in measured
        if each.kind is kind and each.vram_nbytes is not None
    ]
    return sorted(known, key=lambda asset: asset.nbytes, reverse=True)
