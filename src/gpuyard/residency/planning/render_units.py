"""Render units, labels that share a scene and an actor, and the known future: where each asset is needed next. Pure.

A worker renders one unit at a time. Labels that share both assets are split into units of at most `LABELS_PER_UNIT`, so
that several workers can share them. Places count the uses of assets: a unit's scene comes just before its actor, as for
the worker.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gpuyard.residency.planning.assets import Kind, key_of

LABELS_PER_UNIT = 32


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """One output. `name` is its folder in the output root; `value` is passed to the renderer."""

    name: str
    value: Any


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """Labels that need the same scene and the same actor; either may be missing."""

    scene: str | None = None
    actor: str | None = None
    labels: tuple[Label, ...]


def split(units: Iterable[Unit], most: int = LABELS_PER_UNIT) -> list[Unit]:
    """Return the same labels in the same order, in units of at most `most` labels (and at most 32)."""
    most = min(max(1, most), LABELS_PER_UNIT)
    return [
        Unit(scene=unit.scene, actor=unit.actor, labels=unit.labels[first : first + most])
        for unit in units
        for first in range(0, len(unit.labels), most)
    ]


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
        for key in self.needed.keys() & keys_of(unit):
            self._remove(key)
            place = self.next_after(key, self.now - 1)
            if place is not None:
                self.needed[key] = place
                insort(self.ahead, (place, key))
        return number, unit

    def next_after(self, key: str, place: float) -> int | None:
        """Return the next place after `place` where an asset is needed, or None."""
        places = self._places.get(key, [])
        at = bisect_right(places, place)
        return places[at] if at < len(places) else None

    def count_uses(self, key: str) -> int:
        """Return the number of units not yet handed out that need an asset."""
        places = self._places.get(key, [])
        return len(places) - bisect_left(places, self.now)

    def forget(self, key: str) -> None:
        """Remove an asset that cannot be used from the future."""
        self._places.pop(key, None)
        if key in self.needed:
            self._remove(key)

    def _remove(self, key: str) -> None:
        del self.ahead[bisect_left(self.ahead, (self.needed.pop(key), key))]


def keys_of(unit: Unit) -> tuple[str, ...]:
    return tuple(key for key in (unit.scene, unit.actor) if key is not None)


def uses_of(number: int, unit: Unit) -> dict[str, int]:
    """Return the places where the unit with that number needs its assets."""
    places = ((unit.scene, 2 * number), (unit.actor, 2 * number + 1))
    return {key: place for key, place in places if key is not None}


def with_keys(unit: Unit) -> Unit:
    """Return the unit with the keys of its assets in place of their paths."""
    scene = None if unit.scene is None else key_of(Kind.SCENE, unit.scene)
    actor = None if unit.actor is None else key_of(Kind.ACTOR, unit.actor)
    return Unit(scene=scene, actor=actor, labels=unit.labels)
