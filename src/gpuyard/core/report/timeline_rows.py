"""A timeline's rows: jobs that ran side by side in one lane stand below each other, and no more rows than that takes.

Each is given the first row that is free when it begins. As they are taken in the order of their beginnings, a new row
is opened only where all others are taken at that moment: there are as many rows as the most that ever overlap.
"""

import heapq
from collections.abc import Sequence

from msgspec import Struct

_FOR_EVER = float("inf")


class Stretch(Struct, frozen=True, kw_only=True):
    """From when until when something ran in a lane; without an end it still runs."""

    lane: int
    begins: float
    ends: float | None = None


def assign_rows(stretches: Sequence[Stretch]) -> list[int]:
    """The row of each; one may begin where another of its row ends."""
    rows = [0] * len(stretches)
    lanes: dict[int, list[int]] = {}
    for place, stretch in enumerate(stretches):
        lanes.setdefault(stretch.lane, []).append(place)
    for places in lanes.values():
        _assign([stretches[place] for place in places], places, rows)
    return rows


def count_rows(stretches: Sequence[Stretch], rows: Sequence[int]) -> dict[int, int]:
    """How many rows each lane has that has any."""
    counted: dict[int, int] = {}
    for stretch, row in zip(stretches, rows, strict=True):
        counted[stretch.lane] = max(counted.get(stretch.lane, 0), row + 1)
    return counted


def _assign(stretches: Sequence[Stretch], places: Sequence[int], rows: list[int]) -> None:
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    opened = 0
    spans = sorted((each.begins, _end(each), place) for each, place in zip(stretches, places, strict=True))
    for begins, ends, place in spans:
        while taken and taken[0][0] <= begins:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, opened = opened, opened + 1
        rows[place] = row
        heapq.heappush(taken, (ends, row))


def _end(stretch: Stretch) -> float:
    """A clock that was set back must not make one end before it began."""
    return _FOR_EVER if stretch.ends is None else max(stretch.begins, stretch.ends)


def suspensions(
    events: Sequence[tuple[float, str]], begins: float, ends: float | None
) -> list[tuple[float, float | None]]:
    """When a run was suspended, by what its job's story tells of all of its runs."""
    found: list[tuple[float, float | None]] = []
    since: float | None = None
    for at, kind in events:
        if at < begins or (ends is not None and at > ends):
            continue
        if kind == "resumed" and since is not None:
            found.append((since, at))
            since = None
        elif kind == "suspending" and since is None:
            since = at
    return found if since is None else [*found, (since, ends)]
