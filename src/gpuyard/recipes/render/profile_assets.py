"""What every asset of a manifest takes on disk, in RAM and in VRAM, and how long it takes to get there.

Each is really read and uploaded, one after the other, as a run would do it. What cannot be is told with its asset.
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
OVERHEAD_NBYTES = 64 * _MB  # what a card's allocator takes beside a buffer
_ESTIMATES_ARE_SHORT_BY = 4  # a loader may make that much of a compressed file


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes; `None` for what could not be measured, and then `problem` says why."""

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


def assets_of(units: Iterable[Unit]) -> list[Measured]:
    """Scenes and then actors, in the order in which they are first needed, with how many labels need each."""
    labels: Counter[tuple[Kind, str]] = Counter()
    for unit in units:
        for kind, path in ((Kind.SCENE, unit.scene), (Kind.ACTOR, unit.actor)):
            if path is not None:
                labels[kind, path] += len(unit.labels)
    found = [Measured(kind=kind, path=path, labels=count) for (kind, path), count in labels.items()]
    return sorted(found, key=lambda asset: asset.kind is Kind.ACTOR)


class Profiler:
    """`name` is the device's, once something was measured there."""

    def __init__(self, loader: Loader, device: str, vram: Budget, ram: Budget) -> None:
        self._loader, self._device = loader, device
        self._vram, self._ram = int(vram.mb * _MB), int(ram.mb * _MB)
        self.name: str | None = None

    def measure(self, assets: Sequence[Measured]) -> Iterator[Measured]:
        """The same, measured."""
        found = [self._described(asset) for asset in assets]
        with open_device(self._room_for([source for _, source in found]), self._device, label="profile") as memory:
            self.name = memory.name
            pool = PagePool(memory.page, page_size(self._ram))
            _warm_up(memory, pool)
            for asset, source in found:
                yield asset if source is None else self._measured(asset, source, memory, pool)

    def _described(self, asset: Measured) -> tuple[Measured, Source | None]:
        try:
            source = self._loader.scene(asset.path) if asset.kind is Kind.SCENE else self._loader.actor(asset.path)
        except AssetError as error:
            return msgspec.structs.replace(asset, problem=error.message), None
        sizes = {"vram_nbytes": source.nbytes, "frame_nbytes": source.frame_nbytes} if source.is_exact else {}
        known = msgspec.structs.replace(asset, frames=source.frames, disk_nbytes=source.disk_nbytes, **sizes)
        return known, source

    def _room_for(self, sources: Sequence[Source | None]) -> int:
        """On the device: no more than the largest one needs, so that others can work there meanwhile."""
        known = [source for source in sources if source is not None]
        most = max((source.nbytes * (1 if source.is_exact else _ESTIMATES_ARE_SHORT_BY) for source in known), default=0)
        return min(self._vram, most + OVERHEAD_NBYTES)

    def _measured(self, asset: Measured, source: Source, memory: DeviceMemory, pool: PagePool) -> Measured:
        landing = _Landing(asset, pool, self._ram)
        try:
            asset = landing.read(source)
            return _uploaded(asset, landing.pages[0], memory)
        except EnvironmentFault as error:
            return msgspec.structs.replace(asset, problem=error.message)
        finally:
            for pages in landing.pages:
                pool.give_back(pages)


class _Landing:
    """Pages for one asset. To make them takes time, which a run needs once, and so it does not count."""

    def __init__(self, asset: Measured, pool: PagePool, most: int) -> None:
        self.pages: list[Pages] = []
        self._asset, self._pool, self._most = asset, pool, most
        self._making_s = 0.0

    def read(self, source: Source) -> Measured:
        began = time.monotonic()
        layouts = source.read(self._allocate)
        return msgspec.structs.replace(
            self._asset,
            ram_nbytes=self.pages[0].nbytes,
            vram_nbytes=self.pages[0].nbytes,
            frame_nbytes=max(layout.nbytes for layout in layouts),
            load_s=time.monotonic() - began - self._making_s,
        )

    def _allocate(self, nbytes: int) -> Pages:
        if nbytes > self._most:
            raise AssetError(self._asset.path, "it is larger than what may be taken of RAM")
        began = time.monotonic()
        self.pages.append(self._pool.take(nbytes))
        self._making_s += time.monotonic() - began
        return self.pages[-1]


def _uploaded(asset: Measured, pages: Pages, memory: DeviceMemory) -> Measured:
    try:
        buffer = memory.allocate(pages.nbytes)
    except DeviceFull as error:
        return msgspec.structs.replace(asset, problem=error.message)
    try:
        began = time.monotonic()
        memory.upload(pages.views(0, pages.nbytes), buffer)
        return msgspec.structs.replace(asset, upload_s=time.monotonic() - began)
    finally:
        memory.free(buffer)


def _warm_up(memory: DeviceMemory, pool: PagePool) -> None:
    """The first copy sets things up, and would be measured with it."""
    pages = pool.take(pool.size)
    _uploaded(Measured(kind=Kind.SCENE, path="", labels=0), pages, memory)
    pool.give_back(pages)
