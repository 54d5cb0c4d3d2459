"""When devices become available for a need, by the ends of their leases, and which of them the head of the queue gets.

A job that has run for longer than expected may end at any moment, or take as long again. The head does not count on it:
it has the device reserved, and also every device that may become available before it is likely to have enough of them.
Where no job is overdue, these are as many as it needs.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile

from msgspec import Struct

from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.device_shares import lease_ids

# The end of each lease; a lease without one may end at any moment.
LeaseEnds = Mapping[str, float]
# A device, and when it becomes available.
Available = tuple[float, str]


class ExpectedEnds(Struct, frozen=True):
    """The soonest and the likely end of each lease. They differ where a job has run for longer than expected."""

    soonest: LeaseEnds
    likely: LeaseEnds


def in_order_of_time(
    fitting: Iterable[str],
    others: Iterable[DeviceState],
    ends: LeaseEnds,
    now: float,
    fits: Callable[[DeviceState], bool],
) -> Iterator[Available]:
    """Yield devices in the order in which they become available: `fitting` are now, `others` once leases have ended. A
    device is examined only when its first lease ends before any device that is known to be available."""
    queue: list[tuple[float, str, DeviceState | None]] = [(now, device_id, None) for device_id in fitting]
    for state in others:
        times = [ends.get(each.lease_id, now) for each in state.promises if each.lease_id is not None]
        if times:
            queue.append((max(now, min(times)), state.device.id, state))
    heapq.heapify(queue)
    while queue:
        at, device_id, unexamined = heapq.heappop(queue)
        if unexamined is None:
            yield at, device_id
        elif (available_at := _available_at(unexamined, ends, now, fits)) is not None:
            heapq.heappush(queue, (available_at, device_id, None))


def available_before(in_order: Iterable[Available], likely: Iterable[Available]) -> list[str]:
    """Return the devices that may become available until enough of them are likely to be. `in_order` are those that
    suit the need, by their soonest times, and `likely` as many as it needs, by their likely times."""
    enough_at = max((at for at, _ in likely), default=0.0)
    return [device_id for _, device_id in takewhile(lambda each: each[0] <= enough_at, in_order)]


def _available_at(state: DeviceState, ends: LeaseEnds, now: float, fits: Callable[[DeviceState], bool]) -> float | None:
    gone: set[str] = set()
    for lease_id in sorted(lease_ids(state), key=lambda each: ends.get(each, now)):
        gone.add(lease_id)
        if fits(state.without(frozenset(gone))):
            return max(now, ends.get(lease_id, now))
    return None
