"""The known future: which work comes in which order, and so when each asset is needed next. Pure."""

from collections import deque
from collections.abc import Sequence

from gpuyard.residency.units import Unit


class Future:
    """Work is handed out in its order; `needed` is where each asset is needed next, among what was not handed out."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Their scenes and actors are the keys of assets."""
        self._units = units
        self._places: dict[str, deque[int]] = {}
        for place, unit in enumerate(units):
            for key in keys_of(unit):
                self._places.setdefault(key, deque()).append(place)
        self.needed = {key: places[0] for key, places in self._places.items()}
        self.now = 0

    def hand_out(self) -> tuple[int, Unit] | None:
        if self.now == len(self._units):
            return None
        place, unit = self.now, self._units[self.now]
        self.now += 1
        for key in keys_of(unit):
            self._go_past(key)
        return place, unit

    def _go_past(self, key: str) -> None:
        places = self._places.get(key)
        if places is None:
            return
        while places and places[0] < self.now:
            places.popleft()
        if places:
            self.needed[key] = places[0]
        else:
            self.forget(key)

    def forget(self, key: str) -> None:
        """It is of no use: nothing is to be done about it any more."""
        self._places.pop(key, None)
        self.needed.pop(key, None)

    @property
    def left(self) -> int:
        return len(self._units) - self.now


def keys_of(unit: Unit) -> tuple[str, ...]:
    return tuple(key for key in (unit.scene, unit.actor) if key is not None)
