"""Faults of the GPUs of attempts: whether a program failed because of its device.

The driver reports a fault at about the time at which the program fails, so the latest sample may be too old to show it.
The end of a failed program is therefore recorded when a newer sample has arrived, or after 2 s without one.
"""

from gpuyard.control.live_jobs import Live
from gpuyard.core.job.job import Attempt, OutcomeKind
from gpuyard.core.scheduling.device_health import device_issues, first_faults
from gpuyard.core.snapshot import Sample
from gpuyard.ports import Ended, LeaseLedger

WAIT_FOR_SAMPLE_S = 2.0


class DeviceHealthWatch:
    def __init__(self, leases: LeaseLedger) -> None:
        self._leases = leases

    def fault_of(self, attempt: Attempt, sample: Sample | None) -> str | None:
        """Return the fault that the driver reports of a GPU of the attempt, or None."""
        if sample is None or attempt.engine:
            return None
        faults = first_faults(device_issues(sample.snapshot, self._leases.health_marks()))
        return next((faults[device_id].text for device_id in attempt.devices if device_id in faults), None)

    def needs_newer_sample(self, live: Live, ended: Ended, sample: Sample | None, now: float) -> bool:
        """Return whether to wait for a sample that was taken after the end: only then is it known whether a GPU that
        reports its health failed."""
        attempt = live.attempt
        if sample is None or ended.at is None or abs(now - ended.at) >= WAIT_FOR_SAMPLE_S:
            return False
        if ended.outcome.kind is not OutcomeKind.FAILED or attempt.stopping is not None or attempt.engine:
            return False
        taken_at = sample.snapshot.taken_at
        if taken_at is None or taken_at >= ended.at or self.fault_of(attempt, sample) is not None:
            return False
        return any(device.health is not None for device in sample.snapshot.devices if device.id in attempt.devices)
