"""Devices that a job does not join because it would end sooner elsewhere, even with the wait for another device.

How deep a device is shared (`sharing_depth`) counts jobs. Where all durations are expected, seconds count instead: jobs
never move, so two long jobs on one device can end last of all, while other devices become free; and two short ones
would wait for nothing.

- Where it fits now, a job ends after its own duration and the delay by each neighbour: its slow-down beside that one,
  for as long as both run. On any other device that suits it, it ends after the last job there and its own duration.
- It does not join a device if it would end there later than on another one, and also later than all work would end if
  that was spread evenly over the devices. While more work waits than that, it hardly matters where a job ends.
- A job of less than a minute joins any device: it hardly matters where.
- Without an expected end of each lease, or with a waiting job of unknown duration, jobs count.

A job that has run for longer than expected counts as half done, as in `longest_job`.
"""

from collections.abc import Collection, Sequence
from functools import cached_property

from msgspec.structs import replace

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.longest_job import LEAST_LEFT_S, RunningWork
from gpuyard.core.scheduling.placement import PlacementState
from gpuyard.core.scheduling.plan import PlannerView, Start, planned_lease_id
from gpuyard.core.scheduling.sharing_gain import asked_share, members
from gpuyard.core.scheduling.wait_reasons import REMEDIES, Reason, ReasonKind
from gpuyard.core.units import format_count, format_duration

# Where more devices have to be compared, or more jobs wait for each, a plan would cost more than it gains.
_MOST_DEVICES, _MOST_JOBS_PER_DEVICE = 64, 16
_ROUNDING_S = 1e-6


class SoonerElsewhere:
    """The comparison for the candidates of one plan. `starts` is the plan's list, which grows."""

    def __init__(self, view: PlannerView, starts: Sequence[Start]) -> None:
        self._view = view
        self._starts = starts
        self._counted = 0  # how many of the starts are in `_left_s`

    def decides(self, job_id: int, need: Need) -> bool:
        """Return whether enough is known to decide by seconds, instead of by jobs, which devices the job joins."""
        if need.devices != 1 or need.is_exclusive or need.ignores_load or not self._may_limit:
            return False
        is_known = self._view.estimate(job_id).likely_s is not None
        return is_known and self._evenly_s is not None and self._count_starts()

    def late_devices(self, job_id: int, need: Need, placement: PlacementState) -> dict[str, Reason]:
        """Return the devices that the job does not join now, with the reasons. `decides` is true of it."""
        seconds, evenly_s = self._view.estimate(job_id).likely_s, self._evenly_s
        if seconds is None or seconds < LEAST_LEFT_S or evenly_s is None:
            return {}
        ends_s = {
            device.id: self._end_s(need, seconds, placement.states[device.id], placement)
            for device in placement.fitting_without_leases(need)
        }
        soonest_s = min(ends_s.values(), default=0.0)
        latest_s = max(evenly_s, soonest_s) + _ROUNDING_S
        late = [device_id for device_id, end_s in ends_s.items() if end_s > latest_s]
        return {
            device_id: _reason(placement.states[device_id], ends_s[device_id], soonest_s)
            for device_id in late
            if placement.states[device_id].lease_count
        }

    @cached_property
    def _may_limit(self) -> bool:
        depth = self._view.placement.packing.depth
        return (
            depth is not None and depth.devices <= _MOST_DEVICES and depth.jobs <= _MOST_JOBS_PER_DEVICE * depth.devices
        )

    @cached_property
    def _left_s(self) -> dict[str, float] | None:
        """The seconds that each lease is expected to last; None if that is not known of all."""
        view, runs = self._view, {run.lease_id: run for run in self._view.running}
        found = {}
        for lease in view.placement.leases:
            run = runs.get(lease.id)
            ends_at = None if run is None else view.ends_about(run.job_id)
            if run is None or ends_at is None:
                return None
            ran_s = run.ran_s(view.now)
            likely_s = ran_s + ends_at - view.now
            found[lease.id] = RunningWork(lease_id=lease.id, devices=1, ran_s=ran_s, likely_s=likely_s).left_s
        return found

    @cached_property
    def _evenly_s(self) -> float | None:
        """The seconds until all work is over if it is spread evenly; None if that is unknown."""
        depth, left_s = self._view.placement.packing.depth, self._left_s
        waiting_s = None if left_s is None else self._view.waiting_s()
        if depth is None or left_s is None or waiting_s is None:
            return None
        running_s = sum(left_s[lease.id] * len(lease.shares) for lease in self._view.placement.leases)
        return (running_s + waiting_s) / depth.devices

    def _count_starts(self) -> bool:
        """Add the starts of this plan to the leases. Return False if the duration of one is unknown."""
        for start in self._starts[self._counted :]:
            likely_s = self._view.estimate(start.job_id).likely_s
            if likely_s is None or self._left_s is None:
                return False
            self._left_s[planned_lease_id(start.job_id)] = likely_s
            self._counted += 1
        return True

    def _end_s(self, need: Need, seconds: float, state: DeviceState, placement: PlacementState) -> float:
        """Return after how many seconds the job would end on the device."""
        present = [each for each in state.promises if not each.is_reservation]
        left_s = [(self._left_s or {}).get(each.lease_id or "", 0.0) for each in present]
        if not placement.fits(need, state):
            return seconds + max(left_s, default=0.0)
        (_, coefficient), *neighbours = members([asked_share(need), *(each.share for each in present)], 0.0)
        beside_s = sum(
            load / 100.0 * min(each_s, seconds) for (load, _), each_s in zip(neighbours, left_s, strict=True)
        )
        return seconds + coefficient * beside_s


def without_devices(need: Need, device_ids: Collection[str]) -> Need:
    return replace(need, banned=(*need.banned, *device_ids)) if device_ids else need


def _reason(state: DeviceState, end_s: float, soonest_s: float) -> Reason:
    holders = tuple(each.holder for each in state.promises)
    text = (
        f"it would end sooner elsewhere: in about {format_duration(soonest_s)}, with the wait for another GPU; "
        f"beside {format_count(state.lease_count, 'job')} on this one in about {format_duration(end_s)}"
    )
    kind = ReasonKind.TOO_DEEP
    return Reason(kind, text, state.device.id, soonest_s, end_s, holders, REMEDIES[kind])
