"""When devices become available for a need, by the ends of their leases."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping

from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.device_shares import lease_ids

# The end of each lease; a lease without one may end at any moment.
LeaseEnds = Mapping[str, float]
# A device, and when it becomes available.
Available = tuple[float, str]


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


def _available_at(state: DeviceState, ends: LeaseEnds, now: float, fits: Callable[[DeviceState], bool]) -> float | None:
    gone: set[str] = set()
    for lease_id in sorted(lease_ids(state), key=lambda each: ends.get(each, now)):
        gone.add(lease_id)
        if fits(state.without(frozenset(gone))):
            return max(now, ends.get(lease_id, now))
    return None
