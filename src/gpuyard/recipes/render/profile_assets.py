"""Measure the size of every asset of a manifest on disk, in RAM and in VRAM, and the time to load and upload it.

Assets are actually read and uploaded, one after the other, as in a run. An asset that cannot be measured has a
`problem`.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from gpuyard.errors import AssetError, DeviceFull, EnvironmentFault
from gpuyard.recipes.render.default_budgets import Budget
from gpuyard.residency.loading.asset_loader import Loader, Source
from gpuyard.residency.memory.device_memory import DeviceMemory
from gpuyard.residency.memory.open_memory import open_device
from gpuyard.residency.memory.page_pool import PagePool, Pages, page_size
from gpuyard.residency.planning.assets import Kind
from gpuyard.residency.planning.render_units import Unit

_MB = 1048576
OVERHEAD_NBYTES = 64 * _MB  # memory of a GPU's allocator beside a buffer
_MAX_EXPANSION = 4  # a loader may decompress a file to this multiple of the estimate


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
        self._vram, self._ram = int(vram.mb * _MB), int(ram.mb * _MB)
        self.name: str | None = None

    def measure(self, assets: Sequence[AssetProfile]) -> Iterator[AssetProfile]:
        """Yield the assets with their measurements."""
        found = [self._describe(asset) for asset in assets]
        with open_device(self._vram_needed([source for _, source in found]), self._device, label="profile") as memory:
            self.name = memory.name
            pool = PagePool(memory.page, page_size(self._ram))
            _warm_up(memory, pool)
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

    def _vram_needed(self, sources: Sequence[Source | None]) -> int:
        """Return the VRAM for the largest asset only, so that other programs can use the rest meanwhile."""
        known = [source for source in sources if source is not None]
        most = max((source.nbytes * (1 if source.is_exact else _MAX_EXPANSION) for source in known), default=0)
        return min(self._vram, most + OVERHEAD_NBYTES)

    def _measure_one(self, asset: AssetProfile, source: Source, memory: DeviceMemory, pool: PagePool) -> AssetProfile:
        reading = _AssetReading(asset, pool, self._ram)
        try:
            asset = reading.read(source)
            return _upload(asset, reading.pages[0], memory)
        except EnvironmentFault as error:
            return msgspec.structs.replace(asset, problem=error.message)
        finally:
            for pages in reading.pages:
                pool.give_back(pages)


class _AssetReading:
    """Reads one asset. The time to allocate pages does not count, because a run allocates them only once."""

    def __init__(self, asset: AssetProfile, pool: PagePool, most: int) -> None:
        self.pages: list[Pages] = []
        self._asset, self._pool, self._most = asset, pool, most
        self._allocation_s = 0.0

    def read(self, source: Source) -> AssetProfile:
        started = time.monotonic()
        layouts = source.read(self._allocate)
        return msgspec.structs.replace(
            self._asset,
            ram_nbytes=self.pages[0].nbytes,
            vram_nbytes=self.pages[0].nbytes,
            frame_nbytes=max(layout.nbytes for layout in layouts),
            load_s=time.monotonic() - started - self._allocation_s,
        )

    def _allocate(self, nbytes: int) -> Pages:
        if nbytes > self._most:
            raise AssetError(self._asset.path, "it is larger than the RAM budget")
        started = time.monotonic()
        self.pages.append(self._pool.take(nbytes))
        self._allocation_s += time.monotonic() - started
        return self.pages[-1]


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


def _warm_up(memory: DeviceMemory, pool: PagePool) -> None:
    """Upload once before measuring, because the first copy includes the device's setup."""
    pages = pool.take(pool.size)
    _upload(AssetProfile(kind=Kind.SCENE, path="", labels=0), pages, memory)
    pool.give_back(pages)
