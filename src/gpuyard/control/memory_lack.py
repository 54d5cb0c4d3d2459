"""Finds out whether an attempt failed for lack of memory, and who held the memory at that moment."""

from collections.abc import Iterator

from gpuyard.control.live_jobs import Live
from gpuyard.control.track_usage import NOTHING_MB, UsageTracker
from gpuyard.core.job.job import Attempt, MemoryLack, OutcomeKind
from gpuyard.core.memory.out_of_memory import Shortage, ShortageKind, killed_by_kernel
from gpuyard.core.scheduling.wait_reasons import describe_holder
from gpuyard.ports import Ended, LeaseLedger

# A device with less free memory than this counts as full.
_FULL_MB, _FULL_SHARE = 512.0, 0.02
_CRASHED = (134, 135, 139)  # SIGABRT, SIGBUS, SIGSEGV: programs that do not check their allocations end like this


class MemoryLackFinder:
    def __init__(self, usage_tracker: UsageTracker, leases: LeaseLedger) -> None:
        self._usage_tracker = usage_tracker
        self._leases = leases

    def find(self, live: Live, ended: Ended) -> MemoryLack | None:
        """Return what memory the attempt lacked; None if it did not run out of memory or was asked to stop."""
        if live.attempt.stopping is not None or ended.outcome.kind is not OutcomeKind.FAILED:
            return None
        shortage = ended.shortage or self._infer_shortage(live.attempt, ended.outcome.status)
        had_devices = bool(live.attempt.devices) or (live.attempt.engine and live.job.spec.need.devices)
        if shortage is None or (shortage.where is ShortageKind.DEVICE and not had_devices):
            return None
        others = self._others(live.attempt) if shortage.where is ShortageKind.DEVICE else ()
        return MemoryLack(shortage=shortage, others=tuple(others))

    def _infer_shortage(self, attempt: Attempt, status: int | None) -> Shortage | None:
        """Infer a shortage that the program did not report: killed while RAM was full, or crashed on a full device."""
        sample = self._usage_tracker.last
        if sample is None or attempt.usage is None or attempt.engine:
            return None
        snapshot = sample.snapshot
        killed = killed_by_kernel(status, None, None, attempt.usage.ram_mb, snapshot.host.memory_total_mb)
        if killed is not None or status not in _CRASHED:
            return killed
        for device in filter(None, map(snapshot.device, attempt.devices)):
            free, total = device.memory_free_mb, device.memory_total_mb
            if free is not None and total is not None and free < max(_FULL_MB, _FULL_SHARE * total):
                return Shortage(
                    where=ShortageKind.DEVICE,
                    says="it crashed while its GPU was full",
                    free_mb=free,
                    total_mb=total,
                    held_mb=attempt.usage.peaks_mb.get(device.id),
                )
        return None

    def _others(self, attempt: Attempt) -> Iterator[tuple[str, float | None]]:
        """Yield the other holders of memory on its devices in the last sample, and how much each held."""
        sample = self._usage_tracker.last
        if sample is None:
            return
        snapshot, leases = sample.snapshot, self._usage_tracker.all_leases()
        measured = self._leases.measure(snapshot, leases)
        for device in filter(None, map(snapshot.device, attempt.devices)):
            here = [lease for lease in leases if lease.on(device.id) is not None and lease.id != attempt.lease_id]
            yield from ((describe_holder(lease.holder), measured.get((lease.id, device.id))) for lease in here)
            seen = sum(measured.get((lease.id, device.id)) or 0.0 for lease in here)
            own = 0.0 if attempt.usage is None else attempt.usage.peaks_mb.get(device.id, 0.0)
            foreign = (device.memory_used_mb or 0.0) - seen - own
            if foreign > NOTHING_MB:
                yield "processes without a lease", foreign
