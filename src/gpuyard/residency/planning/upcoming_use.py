"""The known future: which work comes in which order, and so when each asset is needed next. Pure.

Places count the uses of assets: a unit's scene comes just before its actor, as it does for the worker.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from gpuyard.residency.planning.render_units import Unit


class Future:
    """Work is handed out in its order; `needed` is where each asset is needed next, among what was not handed out.

    `ahead` is the same, soonest first.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        """Their scenes and actors are the keys of assets."""
        self._units = units
        self._handed = 0
        self._places: dict[str, list[int]] = {}
        for number, unit in enumerate(units):
            for key, place in uses_of(number, unit).items():
                self._places.setdefault(key, []).append(place)
        self.needed = {key: places[0] for key, places in self._places.items()}
        self.ahead = sorted((place, key) for key, place in self.needed.items())

    @property
    def now(self) -> int:
        return 2 * self._handed

    def hand_out(self) -> tuple[int, Unit] | None:
        """The next unit and its number."""
        if self._handed == len(self._units):
            return None
        number, unit = self._handed, self._units[self._handed]
        self._handed += 1
        for key in keys_of(unit):
            self._go_past(key)
        return number, unit

    def _go_past(self, key: str) -> None:
        if key not in self.needed:
            return
        self._take_out(key)
        place = self.next_after(key, self.now - 1)
        if place is None:
            del self.needed[key]
        else:
            self.needed[key] = place
            insort(self.ahead, (place, key))

    def next_after(self, key: str, place: float) -> int | None:
        """Where it is needed next after that place."""
        places = self._places.get(key, [])
        at = bisect_right(places, place)
        return places[at] if at < len(places) else None

    def forget(self, key: str) -> None:
        """It is of no use: nothing is to be done about it any more."""
        self._places.pop(key, None)
        if key in self.needed:
            self._take_out(key)
            del self.needed[key]

    def _take_out(self, key: str) -> None:
        del self.ahead[bisect_left(self.ahead, (self.needed[key], key))]


def keys_of(unit: Unit) -> tuple[str, ...]:
    return tuple(key for key in (unit.scene, unit.actor) if key is not None)


def uses_of(number: int, unit: Unit) -> dict[str, int]:
    """Where the unit of that number needs its assets."""
    places = ((unit.scene, 2 * number), (unit.actor, 2 * number + 1))
    return {key: place for key, place in places if key is not None}
