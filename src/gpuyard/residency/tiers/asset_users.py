"""The requests for assets that are waiting, and the loans of assets in use."""

from collections import Counter

import msgspec

from gpuyard.errors import EnvironmentFault
from gpuyard.residency.planning.render_units import Unit
from gpuyard.residency.planning.upcoming_use import uses_of
from gpuyard.residency.tiers.asset_copies import Copies

_SCENE_HOLDER_BONUS = 1 << 40  # places by which the requests of workers that hold a scene go first


class TiersStopped(Exception):
    """The run is being stopped: the tiers lend no more assets."""


class TooLarge(EnvironmentFault):
    """An asset does not fit into the budgets beside the others."""


class Loan(msgspec.Struct, frozen=True, kw_only=True):
    """Copies that stay in place until they are given back: in VRAM, or, for a stream, in RAM or on disk.

    The sizes of a stream are those at its start: its frames may turn out to be larger.
    """

    copies: Copies
    is_streamed: bool = False
    stream_nbytes: int = 0
    stream_ram: int = 0  # for a stream from disk


class AssetUsers:
    """Requests and loans. The caller holds the tiers' lock. `held` counts loans of copies in VRAM, `held_ram` copies in
    RAM that are being copied from."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.held_ram: Counter[str] = Counter()
        self.stream_nbytes = self.stream_ram = 0
        self._requests: dict[tuple[str, int], int] = {}  # the place in the order, by asset and number of the unit
        self._last_use: dict[str, int] = {}
        self._count = 0

    def request(self, number: int, unit: Unit) -> None:
        self._requests.update({(key, number): place for key, place in uses_of(number, unit).items()})

    def requested(self) -> dict[str, int]:
        """Return the earliest place of each requested asset."""
        places: dict[str, int] = {}
        for (key, _), place in self._requests.items():
            places[key] = min(place, places.get(key, place))
        return places

    def withdraw(self, number: int) -> bool:
        """Remove the waiting requests of a unit. Return whether there were any."""
        waiting = [request for request in self._requests if request[1] == number]
        for request in waiting:
            del self._requests[request]
        return bool(waiting)

    def lend(self, loan: Loan, key: str, number: int) -> None:
        """Record a loan. The unit's other requests now go before all others."""
        del self._requests[key, number]
        self._count += 1
        self._last_use[key] = self._count
        self._hold(loan, 1)
        for request, place in self._requests.items():
            if request[1] == number:
                self._requests[request] = place - _SCENE_HOLDER_BONUS

    def give_back(self, loan: Loan) -> None:
        self._hold(loan, -1)

    def _hold(self, loan: Loan, change: int) -> None:
        self.stream_nbytes += change * loan.stream_nbytes
        self.stream_ram += change * loan.stream_ram
        if not loan.stream_ram:
            add_count(self.held_ram if loan.is_streamed else self.held, loan.copies.asset.key, change)

    def last_use(self, key: str) -> int:
        """Return a number that is higher for later uses."""
        return self._last_use.get(key, 0)


def add_count(counter: Counter[str], key: str, change: int) -> None:
    """Change a count, and remove it when it becomes 0: `counter.keys()` are the assets in use."""
    counter[key] += change
    if not counter[key]:
        del counter[key]


def without_traceback(error: EnvironmentFault) -> EnvironmentFault:
    """Return a copy of an error: the traceback of one error would grow each time that it is raised."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy
