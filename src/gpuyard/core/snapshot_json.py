"""A snapshot as JSON for scripts. The format is stable: keys are only ever added; unknown is `null`."""

from datetime import UTC, datetime
from typing import Any, overload

from msgspec import to_builtins

from gpuyard.core.snapshot import Device, Snapshot


def snapshot_as_dict(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "taken_at": iso_time(snapshot.taken_at),
        "host": to_builtins(snapshot.host),
        "devices": [{**device_as_dict(device), "label": snapshot.labels.get(device.id)} for device in snapshot.devices],
        "problems": to_builtins(list(snapshot.problems)),
    }


def device_as_dict(device: Device) -> dict[str, Any]:
    return {**to_builtins(device), "healthy": device.healthy}


@overload
def iso_time(seconds: float) -> str: ...


@overload
def iso_time(seconds: float | None) -> str | None: ...


def iso_time(seconds: float | None) -> str | None:
    """Return the time in UTC, with milliseconds."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
