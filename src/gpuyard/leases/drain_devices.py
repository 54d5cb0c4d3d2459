"""Drain and undrain devices by the names that users type."""

from collections.abc import Sequence

from gpuyard.core.device_names import find_all_devices
from gpuyard.core.lease import Drain
from gpuyard.core.snapshot import Snapshot
from gpuyard.leases.ledger import Ledger


def drain_devices(ledger: Ledger, names: Sequence[str | int], reason: str, snapshot: Snapshot) -> list[Drain]:
    """Let nothing new start on these devices. Raises UserError for an unknown name before any is drained."""
    return [ledger.drain(device_id, reason) for device_id in find_all_devices(names, snapshot)]


def undrain_devices(ledger: Ledger, names: Sequence[str | int], snapshot: Snapshot) -> list[str]:
    """Let work start on these devices again, and return their ids. Also finds drained devices that are gone."""
    gone = {drain.device_id for drain in ledger.read_drains() if snapshot.device(drain.device_id) is None}
    ids = [each for name in names for each in ([str(name)] if name in gone else find_all_devices([name], snapshot))]
    for device_id in ids:
        ledger.undrain(device_id)
    return ids
