"""What is known about jobs that share devices: the loads of those that run, and which job decides when all is over."""

import math
from collections.abc import Sequence

from msgspec.structs import replace

from gpuyard.control.transitions import JobTransitions
from gpuyard.core.memory.neighbours import assumed_load
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.longest_job import RunningWork, WaitingWork, find_longest
from gpuyard.core.scheduling.queue_order import LaneQueue
from gpuyard.core.scheduling.sharing_depth import MOST_PER_DEVICE, depth_limit

# The longest jobs are searched for at most this often.
_SEARCH_EVERY_S, _COUNT_EVERY_S = 1.0, 10.0
# Waiting work is the mean of this many waiting jobs, times their number. With more than _MANY_WAITING jobs it counts as
# endless: a step must not take longer the more jobs wait.
_EXAMINED_JOBS, _MANY_WAITING = 32, 10_000

# Loads are rounded to this, in percent, so that most device states stay as they are (`known_states`).
_LOAD_STEP = 5.0
# With this least gain, memory alone decides which jobs share a device.
_MEMORY_ALONE_PERCENT = -100.0


class SharingFacts:
    def __init__(self, transitions: JobTransitions) -> None:
        self._transitions = transitions
        self._likely: dict[tuple[int, int], float | None] = {}
        self._longest: dict[str, float] = {}
        self._searched_at = self._counted_at = -math.inf
        self._waiting: tuple[int, list[tuple[int, float | None]]] = (0, [])
        self._queued = self._examined_of = 0  # jobs that wait for devices: now, and when some were examined

    def lease_loads(self, now: float) -> dict[str, float]:
        """Return the load of each running job by its lease, as far as it was measured."""
        found: dict[str, float] = {}
        for live in self._transitions.live.values():
            attempt = live.attempt
            if attempt.lease_id is not None and attempt.usage is not None:
                load = assumed_load(None, attempt.usage.load_percent, attempt.ran_s(now))
                found[attempt.lease_id] = _LOAD_STEP * round(load / _LOAD_STEP)
        return found

    def packing(self, packing: Packing, queues: Sequence[LaneQueue], devices: int) -> Packing:
        """Return the limits of sharing with the present number of jobs for the usable devices."""
        least = packing.min_gain_percent
        if least is None or least <= _MEMORY_ALONE_PERCENT or devices < 2:
            return packing
        live = self._transitions.live.values()
        jobs, most = sum(len(each.attempt.devices) for each in live), MOST_PER_DEVICE * devices
        waiting = (queue.lane for queue in queues if not queue.lane.resumes and not queue.lane.engine)
        lanes = [lane.id for lane in waiting if lane.need.devices]
        self._queued = self._transitions.store.count_queued(lanes, most)
        return replace(packing, depth=depth_limit(jobs + self._queued, devices))

    def longest(self, now: float, devices: int) -> dict[str, float]:
        """Return the leases of the jobs that decide when all work is over, with the seconds that each has left.
        `devices` is the number of usable ones."""
        if devices > 1 and not self._searched_at <= now < self._searched_at + _SEARCH_EVERY_S:
            self._searched_at = now
            known, self._likely, works = self._likely, {}, []
            for live in self._transitions.live.values():
                attempt = live.attempt
                if not attempt.lease_id or not attempt.devices:
                    continue
                key = (attempt.job_id, attempt.number)
                # As it was known when the attempt was first seen.
                likely_s = known[key] if key in known else self._transitions.estimates.usual_s(live.job)
                self._likely[key] = likely_s
                work = RunningWork(
                    lease_id=attempt.lease_id, devices=len(attempt.devices), ran_s=attempt.ran_s(now), likely_s=likely_s
                )
                works.append(work)
            self._longest = find_longest(works, lambda unknown_s: self._waiting_work(now, unknown_s), devices)
        return self._longest

    def waiting_s(self, now: float) -> float | None:
        """Return the device-seconds of all waiting jobs; None if the duration of one that was examined is unknown. Jobs
        that have started since then no longer count: they are part of the running work."""
        _, examined = self._examined(now)
        if any(seconds is None for _, seconds in examined):
            return None
        left = self._queued / self._examined_of if self._examined_of else 1.0
        return left * self._waiting_work(now, 0.0).device_s

    def _waiting_work(self, now: float, unknown_s: float) -> WaitingWork:
        count, examined = self._examined(now)
        if count > _MANY_WAITING:
            return WaitingWork(device_s=math.inf)
        known = [seconds for _, seconds in examined if seconds is not None]
        usual_s = sum(known) / len(known) if known else unknown_s
        durations_s = [usual_s if seconds is None else seconds for _, seconds in examined]
        device_s = sum(devices * duration_s for (devices, _), duration_s in zip(examined, durations_s, strict=True))
        return WaitingWork(device_s=count * device_s / max(1, len(examined)), durations_s=durations_s)

    def _examined(self, now: float) -> tuple[int, list[tuple[int, float | None]]]:
        """Return what `_examine` found less than _COUNT_EVERY_S ago."""
        if not self._counted_at <= now < self._counted_at + _COUNT_EVERY_S:
            self._counted_at, self._examined_of = now, self._queued
            self._waiting = self._examine()
        return self._waiting

    def _examine(self) -> tuple[int, list[tuple[int, float | None]]]:
        """Return the number of waiting jobs, and the devices and likely duration of some of them."""
        estimates = self._transitions.estimates
        ids = self._transitions.store.ready_ids(_MANY_WAITING + 1)
        some = ids[:: math.ceil(len(ids) / _EXAMINED_JOBS) or 1] if len(ids) <= _MANY_WAITING else []
        jobs = [job for job in map(estimates.job, some) if not job.spec.engine]
        return len(ids), [(job.spec.need.devices, estimates.usual_s(job)) for job in jobs]
