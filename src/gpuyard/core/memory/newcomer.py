"""A newcomer: a running attempt of a job without an estimate. What to expect of it, second by second, and its lease.

Before it uses memory it is charged what is expected of such a job. Then its own climb counts: what it holds, and the
part that may still be missing, which shrinks while its memory is flat. Its lease follows notable changes.
"""

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from gpuyard.core.job.job import Attempt, Usage
from gpuyard.core.lease import Share
from gpuyard.core.memory.expected_peak import FLAT_S, ExpectedPeak, missing_part, peak_while_running
from gpuyard.core.memory.sizing import KnownRuns, expected_before
from gpuyard.core.scheduling.numbers import ALONE_FLAT_S

# Smaller changes are not worth a change of the lease.
_NOTABLE_PART, _NOTABLE_MB, _NOTABLE_PERCENT = 0.05, 128.0, 10.0
_UNUSED = Usage()


class Newcomer:
    """A running attempt at the time `now`, and the runs like it that are known.

    flat_s: for how long its memory has not grown; 0 if it has not used any yet.
    changes_at: when more is known about it if its memory stays as it is; never before it uses any."""

    __slots__ = ("_before", "_missing", "changes_at", "flat_s", "known", "usage")

    def __init__(self, attempt: Attempt, known: KnownRuns, now: float) -> None:
        self.known = known
        self.usage = usage = attempt.usage or _UNUSED
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
    if before.is_exclusive != after.is_exclusive:
        return True
    if abs((after.load_percent or 0.0) - (before.load_percent or 0.0)) >= _NOTABLE_PERCENT:
        return True
    had_mb = (before.memory_mb or 0.0) + sureness * before.spread_mb
    has_mb = (after.memory_mb or 0.0) + sureness * after.spread_mb
    return abs(has_mb - had_mb) >= max(_NOTABLE_MB, _NOTABLE_PART * had_mb)
