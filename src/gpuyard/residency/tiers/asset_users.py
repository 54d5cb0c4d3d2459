"""Who asks for which assets, and who uses them now."""

from collections import Counter

from gpuyard.residency.planning.render_units import Unit
from gpuyard.residency.planning.upcoming_use import uses_of
from gpuyard.residency.tiers.asset_loans import Loan

_HOLDS_A_SCENE = 1 << 40  # how much earlier those are served who would hold up others


class Uses:
    """For whoever has the lock. `held` are copies in VRAM, `held_ram` copies in RAM that are being copied from."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.held_ram: Counter[str] = Counter()
        self.stream_nbytes = self.stream_ram = 0
        self._asked: dict[tuple[str, int], int] = {}  # by asset and by the number of the work: where it is in the order
        self._last: dict[str, int] = {}
        self._count = 0

    def ask(self, number: int, unit: Unit) -> None:
        self._asked.update({(key, number): place for key, place in uses_of(number, unit).items()})

    def asked(self) -> dict[str, int]:
        """The earliest place of each asset that is asked for."""
        places: dict[str, int] = {}
        for (key, _), place in self._asked.items():
            places[key] = min(place, places.get(key, place))
        return places

    def give_up(self, number: int) -> bool:
        """Whether that work still asked for anything."""
        left = [ask for ask in self._asked if ask[1] == number]
        for ask in left:
            del self._asked[ask]
        return bool(left)

    def lend(self, loan: Loan, key: str, number: int) -> None:
        """What else that work asks for goes before all others now."""
        del self._asked[key, number]
        self._count += 1
        self._last[key] = self._count
        self._hold(loan, 1)
        for ask, place in self._asked.items():
            if ask[1] == number:
                self._asked[ask] = place - _HOLDS_A_SCENE

    def give_back(self, loan: Loan) -> None:
        self._hold(loan, -1)

    def _hold(self, loan: Loan, more: int) -> None:
        self.stream_nbytes += more * loan.stream_nbytes
        self.stream_ram += more * loan.stream_ram
        if not loan.stream_ram:
            change(self.held_ram if loan.is_streamed else self.held, loan.copies.asset.key, more)

    def last_use(self, key: str) -> int:
        """Later ones are higher."""
        return self._last.get(key, 0)


def change(counter: Counter[str], key: str, more: int) -> None:
    """Without what is counted no more."""
    counter[key] += more
    if not counter[key]:
        del counter[key]
