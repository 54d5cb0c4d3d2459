"""Unions and gaps of intervals, and what the threads of a program did during the gaps. Pure; times are in seconds."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Interval = tuple[float, float]

_SIZES_S = {"under 20 us": 2e-5, "under 200 us": 2e-4, "under 2 ms": 2e-3, "under 20 ms": 2e-2}


class Span(NamedTuple):
    """What one thread did in an interval. Spans of a thread may be nested: the innermost one counts."""

    thread: str
    what: str
    start: float
    end: float


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals that cover the same time, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def gaps(busy: Sequence[Interval], window: Interval) -> list[Interval]:
    """Return the intervals of the window that `busy`, a union, does not cover."""
    found, at = [], window[0]
    for start, end in busy:
        if start > at:
            found.append((at, min(start, window[1])))
        at = max(at, end)
        if at >= window[1]:
            break
    if at < window[1]:
        found.append((at, window[1]))
    return [gap for gap in found if gap[1] > gap[0]]


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    clipped = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return [part for part in clipped if part[1] > part[0]]


def by_size(intervals: Iterable[Interval]) -> dict[str, float]:
    """Return the total time of the intervals by their length."""
    sums: Counter[str] = Counter()
    for start, end in intervals:
        name = next((name for name, limit in _SIZES_S.items() if end - start < limit), "longer")
        sums[name] += end - start  # type: ignore[assignment]
    return {name: round(sums[name], 3) for name in (*_SIZES_S, "longer") if name in sums}


class ThreadStates:
    """What each thread does at a time, from its spans; `idle` where it has none."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._changes: dict[str, tuple[list[float], list[str]]] = {}
        by_thread: dict[str, list[Span]] = {}
        for span in spans:
            by_thread.setdefault(span.thread, []).append(span)
        for thread, own in by_thread.items():
            self._changes[thread] = _flatten(own)

    @property
    def threads(self) -> list[str]:
        return sorted(self._changes)

    def at(self, thread: str, when: float) -> str:
        times, states = self._changes[thread]
        place = bisect_right(times, when) - 1
        return states[place] if place >= 0 else "idle"

    def seconds(self, thread: str, window: Interval) -> dict[str, float]:
        """Return the time of each state within the window."""
        times, states = self._changes[thread]
        edges = [*times, float("inf")]
        sums: dict[str, float] = {}
        for place, state in enumerate(states):
            parts = clip([(edges[place], edges[place + 1])], window)
            sums[state] = sums.get(state, 0.0) + total(parts)
        return {state: round(seconds, 3) for state, seconds in sums.items() if seconds}

    def causes(self, intervals: Iterable[Interval], threads: Sequence[str]) -> list[tuple[str, float]]:
        """Return the states of these threads in the middle of each interval, as text, by total time, longest first."""
        sums: dict[str, float] = {}
        for start, end in intervals:
            states = Counter(self.at(thread, (start + end) / 2) for thread in threads)
            text = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
            sums[text] = sums.get(text, 0.0) + end - start
        return sorted(((text, round(seconds, 3)) for text, seconds in sums.items()), key=lambda item: -item[1])


def _flatten(spans: Sequence[Span]) -> tuple[list[float], list[str]]:
    """Return the times at which the innermost span changes, and the state from each of them on."""
    edges = [(span.start, 1, -span.end, span.what) for span in spans]
    edges += [(span.end, 0, -span.start, span.what) for span in spans]
    times, states, open_spans = [0.0], ["idle"], ["idle"]
    for when, is_start, _, what in sorted(edges):
        if is_start:
            open_spans.append(what)
        else:
            open_spans.reverse()
            open_spans.remove(what)
            open_spans.reverse()
        times.append(when)
        states.append(open_spans[-1])
    return times, states
