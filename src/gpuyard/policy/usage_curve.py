"""How often a job's memory is read, its curve over time, and what a first run may still take by its climb."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from gpuyard.model.job import Attempt, Usage
from gpuyard.model.lease import Share
from gpuyard.policy.estimates import FLAT_S, ExpectedPeak, missing_part, peak_while_running
from gpuyard.policy.numbers import ALONE_FLAT_S
from gpuyard.policy.sizing import KnownRuns, expected_before

READ_OFTEN_EVERY_S = 0.1


def devices_to_watch(first_runs: Iterable[Attempt], now: float) -> frozenset[str]:
    """Return the devices that are read often: of runs whose need is unknown, or larger than expected."""
    watched: set[str] = set()
    for attempt in first_runs:
        ran_s, usage = attempt.ran_s(now), attempt.usage
        # Memory that has not grown for 5 s is flat. A program that has not used its device after 2 min may never do so.
        is_growing = ran_s - usage.grew_at_s < 5.0 if usage is not None and usage.peaks_mb else ran_s < 120.0
        watched.update(attempt.devices if is_growing else ())
    return frozenset(watched)


def holds_more_than_reserved(attempt: Attempt) -> bool:
    """Return whether the attempt was measured to hold more than its declared or learned memory."""
    reserved, peak = attempt.reserved_mb, (attempt.usage or Usage()).peak_mb
    # Drivers round, and may count the context of a process.
    return reserved is not None and peak is not None and peak > reserved * 1.05


MOST_POINTS = 120


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
    # Compare with the level of the last growth, not with the last sample, to notice slow growth. Less than 2% is none:
    # allocators round, and drivers count in pages.
    if any(used > levels.get(device_id, 0.0) * 1.02 for device_id, used in known.items()):
        levels, grew_at_s = {**levels, **peaks}, at_s
    flat_levels = usage.flat_levels_mb
    if peaks and (newly_flat := bisect_right(FLAT_S, at_s - grew_at_s) - len(flat_levels)) > 0:
        flat_levels += (round(max(peaks.values()), 1),) * newly_flat
    last, mean, seconds = usage.load_now, usage.load_percent, usage.load_s
    if last is not None or load_percent is not None:
        # Samples come at uneven times, so each load counts for the time until the next one.
        if last is not None and at_s > usage.load_at_s:
            elapsed = at_s - usage.load_at_s
            mean = ((mean or 0.0) * seconds + last * elapsed) / (seconds + elapsed)
            seconds += elapsed
        mean = mean if seconds or load_percent is None else load_percent
        usage = replace(usage, load_percent=mean, load_s=seconds, load_now=load_percent, load_at_s=at_s)
    return replace(
        usage,
        peaks_mb={**usage.peaks_mb, **peaks},
        ram_mb=ram_mb if usage.ram_mb is None else max(usage.ram_mb, ram_mb or 0.0),
        curve=_with_point(usage.curve, at_s, sum(known.values())) if known else usage.curve,
        grew_at_s=grew_at_s,
        levels_mb=levels,
        flat_levels_mb=flat_levels,
    )


def _with_point(curve: tuple[tuple[float, float], ...], at_s: float, used: float) -> tuple[tuple[float, float], ...]:
    """Add a point. Beyond MOST_POINTS, merge those of equal intervals into one that keeps the highest figure."""
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


class Newcomer:
    """A running attempt, and the runs like it that are known. `flat_s`: for how long its memory has not grown.
    `changes_at`: when more is known about it if its memory stays as it is; never before it uses any."""

    def __init__(self, attempt: Attempt, known: KnownRuns, now: float) -> None:
        self.known = known
        self.usage = usage = attempt.usage or Usage()
        self.flat_s, self.changes_at = 0.0, math.inf
        self._before: dict[float, ExpectedPeak] = {}  # what was expected before it began, by the size of the device
        self._missing: tuple[float, float] | None = None  # the part of its peak that may still be missing
        if usage.peaks_mb:
            self.flat_s = flat_s = attempt.ran_s(now) - usage.grew_at_s
            self.changes_at = next((now + each - flat_s for each in FLAT_S if each > flat_s), math.inf)

    def expected(self, device_id: str, device_mb: float) -> ExpectedPeak:
        """Return what to expect of it on one of its devices, which has `device_mb` of memory."""
        before, known = self._before.get(device_mb), self.known
        if before is None:
            before = self._before[device_mb] = expected_before(known, device_mb)
        if not self.usage.peaks_mb:
            return before
        if self._missing is None:
            wider = (known.machine, known.framework, known.program)
            self._missing = missing_part(self.flat_s, [each.climb for each in wider if each is not None])
        return peak_while_running(self.usage.peaks_mb.get(device_id, 0.0), self._missing, before)

    def adjusted_shares(
        self, shares: Sequence[Share], sizes_mb: Mapping[str, float], sureness: float
    ) -> tuple[Share, ...]:
        """Return the shares of its lease by what is expected now; the same where that has hardly changed."""
        if not all(sizes_mb.get(share.device_id) for share in shares):
            return tuple(shares)
        adjusted = tuple([self._adjusted(share, sizes_mb[share.device_id], sureness) for share in shares])
        is_notable = any(_is_notable(before, after, sureness) for before, after in zip(shares, adjusted, strict=True))
        return adjusted if is_notable else tuple(shares)

    def _adjusted(self, share: Share, device_mb: float, sureness: float) -> Share:
        expected = self.expected(share.device_id, device_mb)
        if self.usage.load_percent is not None:
            share = replace(share, load_percent=self.usage.load_percent)
        at_most_mb = expected.at_most_mb(sureness)
        if share.is_exclusive:
            is_measured = share.device_id in self.usage.peaks_mb
            if not is_measured or self.flat_s < ALONE_FLAT_S or at_most_mb >= device_mb:
                return share
        elif not share.spread_mb:  # a part of a device, which never grows again: the rest may be promised to others
            if self.flat_s < ALONE_FLAT_S:
                return share
            return replace(share, memory_mb=min(at_most_mb, share.memory_mb or 0.0))
        mean_mb = min(expected.mean_mb, device_mb)
        return replace(share, memory_mb=mean_mb, spread_mb=expected.spread_mb, is_exclusive=False)


def _is_notable(before: Share, after: Share, sureness: float) -> bool:
    """Return whether the change is worth a change of the lease."""
    has_other_load = abs((after.load_percent or 0.0) - (before.load_percent or 0.0)) >= 10.0
    had_mb = (before.memory_mb or 0.0) + sureness * before.spread_mb
    has_mb = (after.memory_mb or 0.0) + sureness * after.spread_mb
    has_other_memory = abs(has_mb - had_mb) >= max(128.0, 0.05 * had_mb)
    return before.is_exclusive != after.is_exclusive or has_other_load or has_other_memory
