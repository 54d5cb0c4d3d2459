"""Device states that outlast a plan: most devices are as they were when the last plan was made.

A state is used again while the device's reading, its leases, their measured use and its load are equal. It remembers
what was asked of it: which needs it refuses and why, and how it looks without its leases or with a reservation.
"""

from collections.abc import Mapping
from typing import Protocol

from msgspec.structs import replace

from gpuyard.core.lease import Holder, Lease, Need
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.device_memory import DeviceState, PromisedShare, fits_alike
from gpuyard.core.scheduling.device_shares import share_of
from gpuyard.core.scheduling.foreign_load import NO_FOREIGN_LOAD, ForeignLoad
from gpuyard.core.scheduling.known_refusals import KnownRefusals
from gpuyard.core.scheduling.wait_reasons import Reason
from gpuyard.core.snapshot import Device, Snapshot


class MeasuredLeases(Protocol):
    """The part of a PlacementView that device states depend on."""

    @property
    def snapshot(self) -> Snapshot: ...
    @property
    def leases(self) -> tuple[Lease, ...]: ...
    @property
    def measured(self) -> Mapping[tuple[str, str], float | None]: ...
    @property
    def loads(self) -> Mapping[str, float | None]: ...
    @property
    def foreign(self) -> Mapping[str, ForeignLoad]: ...
    @property
    def lease_loads(self) -> Mapping[str, float]: ...
    @property
    def packing(self) -> Packing: ...
    @property
    def closed(self) -> Mapping[str, Reason]: ...


class KnownStates:
    """The states of the last placement, by device id. What states remember holds for one `packing` and `closed`."""

    def __init__(self) -> None:
        self.refusals = KnownRefusals()
        self._states: dict[str, DeviceState] = {}
        self._promises: dict[tuple[str, str], PromisedShare] = {}
        self._request: tuple[Need, Holder, bool] | None = None  # the last reservation of the head
        self._reserved: dict[str, PromisedShare] = {}  # its share of each device
        self._terms: tuple[Packing, Mapping[str, Reason]] | None = None

    def update(self, view: MeasuredLeases) -> dict[str, DeviceState]:
        """Return the state of each device, unhealthy ones included, as these have to be explained too."""
        terms = (view.packing, view.closed)
        known = self._states if terms == self._terms else {}
        self._terms = terms
        promises = self._leased_shares(view)
        limits_load = view.packing.max_load_percent is not None
        self._states = {}
        for device in view.snapshot.unsplit_devices():
            here, load = promises.get(device.id, []), view.loads.get(device.id)
            foreign = view.foreign.get(device.id, NO_FOREIGN_LOAD)
            state = known.get(device.id)
            if state is None or not (
                (state.device is device or state.device == device)
                and state.promises == here
                and state.measured_percent == load
                and state.foreign == foreign
            ):
                before, state = state, DeviceState(device, here, load, foreign, view.packing.sureness)
                if before is not None and fits_alike(before, state, limits_load=limits_load):
                    state.mark = before.mark
            self._states[device.id] = state
        return dict(self._states)

    def reservation(self, need: Need, holder: Holder, device: Device, *, is_exclusive: bool) -> PromisedShare:
        """Return the share of a device that is reserved for a request: the same object while the request is the same,
        which is fast to compare."""
        request = (need, holder, is_exclusive)
        if self._request != request:
            self._request, self._reserved = request, {}
        found = self._reserved.get(device.id)
        if found is None:
            share = replace(share_of(need, device), is_exclusive=is_exclusive)
            found = self._reserved[device.id] = PromisedShare(share=share, holder=holder, is_reservation=True)
        return found

    def _leased_shares(self, view: MeasuredLeases) -> dict[str, list[PromisedShare]]:
        """Return the leased shares by device. An unchanged one is the object of last time, which is fast to compare."""
        known, self._promises = self._promises, {}
        promises: dict[str, list[PromisedShare]] = {}
        measured, loads = view.measured, view.lease_loads
        for lease in view.leases:
            load = loads.get(lease.id)
            for each in lease.shares:
                key = lease.id, each.device_id
                held_mb, promise = measured.get(key), known.get(key)
                share = each if load is None or each.load_percent is not None else replace(each, load_percent=load)
                if promise is None or not (
                    promise.measured_mb == held_mb
                    and (promise.share is share or promise.share == share)
                    and (promise.holder is lease.holder or promise.holder == lease.holder)
                ):
                    promise = PromisedShare(share=share, holder=lease.holder, measured_mb=held_mb, lease_id=lease.id)
                self._promises[key] = promise
                promises.setdefault(each.device_id, []).append(promise)
        return promises
