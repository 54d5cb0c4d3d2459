"""A snapshot as JSON for scripts. The format is stable: keys are only ever added; unknown is `null`."""

from datetime import UTC, datetime
from typing import Any, overload

from msgspec.structs import asdict

from gpuyard.core.snapshot import Device, Problem, Snapshot


def snapshot_as_dict(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "taken_at": iso_time(snapshot.taken_at),
        "host": asdict(snapshot.host),
        "devices": [device_as_dict(device) for device in snapshot.devices],
        "problems": [problem_as_dict(problem) for problem in snapshot.problems],
    }


def device_as_dict(device: Device) -> dict[str, Any]:
    shape = asdict(device)
    shape["vendor"] = str(device.vendor)
    if device.processes is not None:
        shape["processes"] = [asdict(process) for process in device.processes]
    shape["healthy"] = device.healthy
    return shape


def problem_as_dict(problem: Problem) -> dict[str, Any]:
    return {**asdict(problem), "vendor": problem.vendor and str(problem.vendor)}


@overload
def iso_time(seconds: float) -> str: ...


@overload
def iso_time(seconds: float | None) -> str | None: ...


def iso_time(seconds: float | None) -> str | None:
    """Return the time in UTC, with milliseconds."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
