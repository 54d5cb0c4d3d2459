"""The resource use of an attempt: its peaks, and its memory over time as a bounded number of points."""

import math
from bisect import bisect_right
from collections.abc import Mapping

from msgspec.structs import replace

from gpuyard.core.job.job import Usage
from gpuyard.core.memory.expected_peak import FLAT_S

MOST_POINTS = 120
# Less is no growth: allocators round, and drivers count in pages.
_GREW = 1.02


def add_sample(
    usage: Usage,
    at_s: float,
    memory_mb: Mapping[str, float | None],
    *,
    ram_mb: float | None = None,
    load_percent: float | None = None,
) -> Usage:
    """Return the usage with a sample taken `at_s` seconds after the start. Unknown figures change nothing."""
    known = {device_id: used for device_id, used in memory_mb.items() if used is not None}
    peaks = {device_id: max(used, usage.peaks_mb.get(device_id, 0.0)) for device_id, used in known.items()}
    levels, grew_at_s = usage.levels_mb, usage.grew_at_s
    # Compare with the level of the last growth, not with the last sample, to notice slow growth.
    if any(used > levels.get(device_id, 0.0) * _GREW for device_id, used in known.items()):
        levels, grew_at_s = {**levels, **peaks}, at_s
    flat_levels = usage.flat_levels_mb
    if peaks and (newly_flat := bisect_right(FLAT_S, at_s - grew_at_s) - len(flat_levels)) > 0:
        flat_levels += (round(max(peaks.values()), 1),) * newly_flat
    return replace(
        _with_load(usage, at_s, load_percent),
        peaks_mb={**usage.peaks_mb, **peaks},
        ram_mb=ram_mb if usage.ram_mb is None else max(usage.ram_mb, ram_mb or 0.0),
        curve=_with_point(usage.curve, at_s, sum(known.values())) if known else usage.curve,
        grew_at_s=grew_at_s,
        levels_mb=levels,
        flat_levels_mb=flat_levels,
    )


def _with_load(usage: Usage, at_s: float, load_percent: float | None) -> Usage:
    """Add a load. Samples come at uneven times, so each counts for the time until the next one."""
    last, mean, seconds = usage.load_now, usage.load_percent, usage.load_s
    if last is None and load_percent is None:
        return usage
    if last is not None and at_s > usage.load_at_s:
        elapsed = at_s - usage.load_at_s
        mean = ((mean or 0.0) * seconds + last * elapsed) / (seconds + elapsed)
        seconds += elapsed
    if not seconds and load_percent is not None:
        mean = load_percent
    return replace(usage, load_percent=mean, load_s=seconds, load_now=load_percent, load_at_s=at_s)


def _with_point(curve: tuple[tuple[float, float], ...], at_s: float, used: float) -> tuple[tuple[float, float], ...]:
    """Add a point. Beyond MOST_POINTS, merge the points of equal intervals of time, however many there are, into one
    that keeps the highest figure."""
    longer = (*curve, (round(at_s, 2), round(used, 1)))
    if len(longer) <= MOST_POINTS:
        return longer
    # Powers of two: a later, wider interval consists of whole intervals of before.
    width_s = 2.0 ** math.ceil(math.log2(2 * max(longer[-1][0], 1.0) / MOST_POINTS))
    merged: dict[float, tuple[float, float]] = {}
    for at, mb in longer:
        since, most = merged.setdefault(at // width_s, (at, mb))
        merged[at // width_s] = since, max(most, mb)
    return tuple(merged.values())
