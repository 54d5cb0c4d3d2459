"""Render units: labels that share a scene and an actor. Pure.

A worker renders one unit at a time. Labels that share both assets are split into units of at most `LABELS_PER_UNIT`, so
that several workers can share them.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

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
