"""The copies of one asset on disk, in RAM and in VRAM; requests and loans; and the threads that read parts of
assets."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from queue import PriorityQueue

import msgspec

from gpuyard.errors import EnvironmentFault
from gpuyard.recipes.render.memory.device_memory import Buffer, DeviceMemory, PagePool, Pages
from gpuyard.recipes.render.memory.named_arrays import Layout
from gpuyard.recipes.render.memory.read_asset_files import Source, Spread, call_in_turn
from gpuyard.recipes.render.planning.assets_and_units import Asset, Unit, uses_of


class TiersStopped(Exception):
    """The run is being stopped: the tiers lend no more assets."""


class TooLarge(EnvironmentFault):
    """An asset does not fit into the budgets beside the others."""


class EstimateTooLow(Exception):
    """The asset has `nbytes`, more than estimated. It must be read again when there is enough memory."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class Copies:
    """The copies of an asset. The tiers ensure that no two threads move a copy at the same time."""

    def __init__(self, asset: Asset, source: Source, memory: DeviceMemory, pool: PagePool) -> None:
        self.asset, self.source = asset, source
        self._memory, self._pool = memory, pool
        self.layouts: tuple[Layout, ...] = ()  # one per frame, once the asset was read
        self.pages: Pages | None = None
        self.buffer: Buffer = None

    def read(self, spread: Spread = call_in_turn) -> None:
        """Read from disk to RAM, in parts that `spread` calls."""
        taken: list[Pages] = []

        def allocate(nbytes: int) -> Pages:
            if self._pool.rounded(nbytes) > self._pool.rounded(self.asset.nbytes):
                raise EstimateTooLow(nbytes)
            taken.append(self._pool.take(nbytes))
            return taken[-1]

        try:
            self.layouts = self.source.read(allocate, spread)
        except BaseException:
            for pages in taken:
                self._pool.give_back(pages)
            raise
        self.pages = taken[0]

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


class Loan(msgspec.Struct, frozen=True, kw_only=True):
    """Copies that stay in place until they are given back: in VRAM, or, for a stream, in RAM or on disk. The sizes of a
    stream are those at its start: its frames may turn out to be larger."""

    copies: Copies
    is_streamed: bool = False
    stream_nbytes: int = 0
    stream_ram: int = 0  # for a stream from disk


class AssetUsers:
    """Requests and loans, under the tiers' lock. `held` counts copies lent in VRAM, `held_ram` those being copied
    from."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.held_ram: Counter[str] = Counter()
        self.stream_nbytes = self.stream_ram = 0
        self._requests: dict[tuple[str, int], int] = {}  # the place in the order, by asset and number of the unit
        self.last_use: Counter[str] = Counter()  # higher for later uses
        self._count = 0

    def request(self, number: int, unit: Unit) -> None:
        self._requests.update({(key, number): place for key, place in uses_of(number, unit).items()})

    def requested(self) -> dict[str, int]:
        places: dict[str, int] = {}
        for (key, _), place in self._requests.items():
            places[key] = min(place, places.get(key, place))
        return places

    def withdraw(self, number: int) -> bool:
        """Remove the waiting requests of a unit. Return whether there were any."""
        before = len(self._requests)
        self._requests = {request: place for request, place in self._requests.items() if request[1] != number}
        return len(self._requests) < before

    def lend(self, loan: Loan, key: str, number: int) -> None:
        """Record a loan. The unit's other requests now go before all others."""
        del self._requests[key, number]
        self._count += 1
        self.last_use[key] = self._count
        self.hold(loan, 1)
        for request, place in self._requests.items():
            if request[1] == number:
                self._requests[request] = place - (1 << 40)

    def hold(self, loan: Loan, change: int) -> None:
        """Count a loan (change 1), or its return (-1)."""
        self.stream_nbytes += change * loan.stream_nbytes
        self.stream_ram += change * loan.stream_ram
        if not loan.stream_ram:
            add_count(self.held_ram if loan.is_streamed else self.held, loan.copies.asset.key, change)


def add_count(counter: Counter[str], key: str, change: int) -> None:
    """Change a count, and remove it at 0: `counter.keys()` are the assets in use."""
    counter[key] += change
    if not counter[key]:
        del counter[key]


class PartReaders:
    """Reads the parts of the asset that is needed first before all others: assets read at once arrive together, and
    late."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "gpuyard-part")
        self._numbers = count()
        self._waiting = PriorityQueue[tuple[float, int, Callable[[], object], Future[None]]]()

    def call_all(self, place: float, acts: Sequence[Callable[[], object]]) -> None:
        """Call all, after those with lower places. Waits for all, because they write to memory that is reused if one
        fails."""
        ends: list[Future[None]] = []
        for act in acts:
            ends.append(Future())
            self._waiting.put((place, next(self._numbers), act, ends[-1]))
        for _ in acts:
            self._pool.submit(self._call_first)
        wait(ends)
        for end in ends:
            end.result()

    def _call_first(self) -> None:
        *_, act, end = self._waiting.get()
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for it
            end.set_exception(error)
        else:
            end.set_result(None)

    def close(self) -> None:
        self._pool.shutdown()
