"""Copy one asset between disk, RAM and VRAM."""

from typing import TYPE_CHECKING

from gpuyard.residency.memory.device_memory import Buffer, DeviceMemory
from gpuyard.residency.memory.page_pool import PagePool, Pages
from gpuyard.residency.planning.array_layout import Layout
from gpuyard.residency.planning.assets import Asset

if TYPE_CHECKING:
    from gpuyard.residency.loading.asset_loader import Source


class EstimateTooLow(Exception):
    """The asset has `nbytes`, more than estimated. It must be read again when there is enough memory."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class Copies:
    """The copies of an asset. The tiers ensure that no two threads move a copy at the same time."""

    def __init__(self, asset: Asset, source: "Source", memory: DeviceMemory, pool: PagePool) -> None:
        self.asset, self.source = asset, source
        self._memory, self._pool = memory, pool
        self.layouts: tuple[Layout, ...] = ()  # one per frame, once the asset was read
        self.pages: Pages | None = None
        self.buffer: Buffer = None

    def read(self) -> int:
        """Read from disk to RAM. Return the size."""
        taken: list[Pages] = []

        def allocate(nbytes: int) -> Pages:
            if self._pool.rounded(nbytes) > self._pool.rounded(self.asset.nbytes):
                raise EstimateTooLow(nbytes)
            taken.append(self._pool.take(nbytes))
            return taken[-1]

        try:
            self.layouts = self.source.read(allocate)
        except BaseException:
            for pages in taken:
                self._pool.give_back(pages)
            raise
        self.pages = taken[0]
        return self.pages.nbytes

    def upload(self) -> None:
        """Copy from RAM to VRAM. Raises DeviceFull if the device has too little free memory."""
        assert self.pages is not None
        buffer = self._memory.allocate(self.pages.nbytes)
        try:
            self._memory.upload(self.pages.views(0, self.pages.nbytes), buffer)
        except BaseException:
            self._memory.free(buffer)
            raise
        self.buffer = buffer

    def download(self) -> None:
        """Copy from VRAM to RAM."""
        pages = self._pool.take(self.asset.nbytes)
        try:
            self._memory.download(self.buffer, pages.views(0, pages.nbytes))
        except BaseException:
            self._pool.give_back(pages)
            raise
        self.pages = pages

    def drop_ram(self) -> None:
        if self.pages is not None:
            pages, self.pages = self.pages, None
            self._pool.give_back(pages)

    def drop_vram(self) -> None:
        if self.buffer is not None:
            buffer, self.buffer = self.buffer, None
            self._memory.free(buffer)
