"""The known future: the order of the units, and so the place where each asset is needed next. Pure.

Places count the uses of assets: a unit's scene comes just before its actor, as for the worker.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from gpuyard.residency.planning.render_units import Unit


class Future:
    """Hands out units in order. `needed` is the place where each asset is needed next by units not yet handed out;
    `ahead` is the same, soonest first."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Scenes and actors of `units` are keys of assets."""
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
        """Return the next unit and its number, or None."""
        if self._handed == len(self._units):
            return None
        number, unit = self._handed, self._units[self._handed]
        self._handed += 1
        for key in keys_of(unit):
            self._advance(key)
        return number, unit

    def _advance(self, key: str) -> None:
        if key not in self.needed:
            return
        self._remove(key)
        place = self.next_after(key, self.now - 1)
        if place is None:
            del self.needed[key]
        else:
            self.needed[key] = place
            insort(self.ahead, (place, key))

    def next_after(self, key: str, place: float) -> int | None:
        """Return the next place after `place` where an asset is needed, or None."""
        places = self._places.get(key, [])
        at = bisect_right(places, place)
        return places[at] if at < len(places) else None

    def forget(self, key: str) -> None:
        """Remove an asset that cannot be used from the future."""
        self._places.pop(key, None)
        if key in self.needed:
            self._remove(key)
            del self.needed[key]

    def _remove(self, key: str) -> None:
        del self.ahead[bisect_left(self.ahead, (self.needed[key], key))]


def keys_of(unit: Unit) -> tuple[str, ...]:
    return tuple(key for key in (unit.scene, unit.actor) if key is not None)


def uses_of(number: int, unit: Unit) -> dict[str, int]:
    """Return the places where the unit with that number needs its assets."""
    places = ((unit.scene, 2 * number), (unit.actor, 2 * number + 1))
    return {key: place for key, place in places if key is not None}
