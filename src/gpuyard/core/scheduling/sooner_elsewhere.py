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

from collections.abc import Mapping, Sequence
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.longest_job import LEAST_LEFT_S, RunningWork
from gpuyard.core.scheduling.placement import PlacementState
from gpuyard.core.scheduling.plan import PlannerView, Start, planned_lease_id
from gpuyard.core.scheduling.sharing_gain import asked_member, present_members
from gpuyard.core.scheduling.wait_reasons import REMEDIES, Reason, ReasonKind
from gpuyard.core.units import format_count, format_duration

# Where more devices have to be compared, or more jobs wait for each, a plan would cost more than it gains.
_MOST_DEVICES, _MOST_JOBS_PER_DEVICE = 64, 16
_ROUNDING_S = 1e-6


class LateDevices(Struct, frozen=True):
    """The devices that a job does not join, by id, with the seconds after which it would end there; on another one it
    would end after `soonest_s`."""

    devices: Mapping[str, tuple[DeviceState, float]] = {}
    soonest_s: float = 0.0

    def reason(self, device_id: str) -> Reason | None:
        """Return why the job does not join the device; None if it may."""
        found = self.devices.get(device_id)
        return None if found is None else _reason(*found, self.soonest_s)


NOT_LATE = LateDevices()


class _DeviceWork(Struct, frozen=True):
    """The load (1.0 is a fully busy device) of each lease on a device with the seconds that it has left, and the
    seconds until the last has ended."""

    state: DeviceState
    leases: Sequence[tuple[float, float]]
    last_s: float

    def beside_s(self, seconds: float) -> float:
        """Return for how long a job of these seconds runs beside the leases, each as a part of its load."""
        return sum([load * min(left_s, seconds) for load, left_s in self.leases])


class SoonerElsewhere:
    """The comparison for the candidates of one plan. `starts` is the plan's list, which grows."""

    def __init__(self, view: PlannerView, starts: Sequence[Start]) -> None:
        self._view = view
        self._starts = starts
        self._counted = 0  # how many of the starts are in `_left_s`
        self._works: dict[str, _DeviceWork] = {}  # by device

    def decides(self, job_id: int, need: Need) -> bool:
        """Return whether enough is known to decide by seconds, instead of by jobs, which devices the job joins."""
        if need.devices != 1 or need.is_exclusive or need.ignores_load or not self._may_limit:
            return False
        is_known = self._view.estimate(job_id).likely_s is not None
        return is_known and self._evenly_s is not None and self._count_starts()

    def late_devices(self, job_id: int, need: Need, placement: PlacementState) -> LateDevices:
        """Return the devices that the job does not join now. `decides` is true of it."""
        seconds, evenly_s = self._view.estimate(job_id).likely_s, self._evenly_s
        if seconds is None or seconds < LEAST_LEFT_S or evenly_s is None:
            return NOT_LATE
        ends_s = self._ends_s(need, seconds, placement)
        soonest_s = min(ends_s.values(), default=0.0)
        latest_s = max(evenly_s, soonest_s) + _ROUNDING_S
        late = [(placement.states[device_id], end_s) for device_id, end_s in ends_s.items() if end_s > latest_s]
        devices = {state.device.id: (state, end_s) for state, end_s in late if state.lease_count}
        return LateDevices(devices, soonest_s) if devices else NOT_LATE

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

    def _ends_s(self, need: Need, seconds: float, placement: PlacementState) -> dict[str, float]:
        """Return after how many seconds the job would end on each device that suits it."""
        fitting = {device.id for device in placement.fitting_now(need)}
        _, coefficient = asked_member(need, 0.0)
        ends_s = {}
        for device in placement.fitting_without_leases(need):
            work = self._work_on(placement.states[device.id])
            if device.id in fitting:
                ends_s[device.id] = seconds + coefficient * work.beside_s(seconds)
            else:
                ends_s[device.id] = seconds + work.last_s
        return ends_s

    def _work_on(self, state: DeviceState) -> _DeviceWork:
        """Return what the leases on a device have left. What a lease has left stays the same while a plan is made."""
        known = self._works.get(state.device.id)
        if known is None or known.state is not state:
            present = [each for each in state.promises if not each.is_reservation]
            left_s = [(self._left_s or {}).get(each.lease_id or "", 0.0) for each in present]
            loads = [load / 100.0 for load, _ in present_members(state, 0.0)]
            works = list(zip(loads, left_s, strict=True))
            known = self._works[state.device.id] = _DeviceWork(state, works, max(left_s, default=0.0))
        return known


def without_devices(need: Need, late: LateDevices) -> Need:
    return replace(need, banned=(*need.banned, *late.devices)) if late.devices else need


def _reason(state: DeviceState, end_s: float, soonest_s: float) -> Reason:
    holders = tuple(each.holder for each in state.promises)
    text = (
        f"it would end sooner elsewhere: in about {format_duration(soonest_s)}, with the wait for another GPU; "
        f"beside {format_count(state.lease_count, 'job')} on this one in about {format_duration(end_s)}"
    )
    kind = ReasonKind.TOO_DEEP
    return Reason(kind, text, state.device.id, soonest_s, end_s, holders, REMEDIES[kind])
