"""Jobs that ran out of memory and would run out on every device of this machine, however much they are given.

That is known if the job needed more than the largest suitable device has, or if it ran out on a device of that size
while no other process held memory there.
"""

from collections.abc import Sequence

from gpuyard.core.job.job import Attempt, MemoryLack
from gpuyard.core.lease import Need
from gpuyard.core.memory.out_of_memory import Shortage, ShortageKind
from gpuyard.core.memory.sizing import largest_mb
from gpuyard.core.scheduling.device_fit import check_suitable
from gpuyard.core.scheduling.device_memory import capacity
from gpuyard.core.scheduling.numbers import NEARLY_ALL
from gpuyard.core.snapshot import Device
from gpuyard.core.units import format_size

# They ask for memory of a pool that they took before: what the device shows is the pool.
_POOLED = ("JAX", "TensorFlow")
# Held by others, this is negligible.
_NOTHING_MB = 128.0


def hopeless_reason(need: Need, attempt: Attempt, lack: MemoryLack, devices: Sequence[Device]) -> str | None:
    """Return why the job would run out again on each of these devices; None if more memory may help. A device with a
    fault may work again, so it belongs to them."""
    suitable = [device for device in devices if check_suitable(need, device) is None]
    if any(not device.healthy or capacity(device) is None for device in suitable):
        return None
    most_mb = largest_mb(suitable)
    if lack.shortage.where is not ShortageKind.DEVICE or most_mb is None:
        return None
    needed = needed_mb(attempt, lack.shortage)
    if needed is not None and needed > most_mb:
        return f"out of memory: needed at least {format_size(needed)}; the largest GPU has {format_size(most_mb)}"
    if _had_all(attempt, lack, suitable, most_mb):
        return f"out of memory even alone on the largest GPU ({format_size(most_mb)})"
    return None


def needed_mb(attempt: Attempt, shortage: Shortage) -> float | None:
    """Return the least that it is known to have needed on one device: what it held at most, or what it held when it
    asked for more, together with that."""
    peak = attempt.usage.peak_mb if attempt.usage is not None else None
    held = shortage.held_mb
    if held is None and shortage.framework not in _POOLED:
        held = _last_measured_mb(attempt)
    wanted = None if shortage.asked_mb is None else (held or 0.0) + shortage.asked_mb
    return max((each for each in (peak, wanted) if each is not None), default=None)


def _last_measured_mb(attempt: Attempt) -> float | None:
    """Return what it held in the last sample; None if it had several devices, as the curve is their sum."""
    usage = attempt.usage
    return usage.curve[-1][1] if usage is not None and usage.curve and len(attempt.devices) == 1 else None


def _had_all(attempt: Attempt, lack: MemoryLack, suitable: Sequence[Device], most_mb: float) -> bool:
    """Return whether it had devices of the largest size to itself."""
    sizes = {device.id: capacity(device) for device in suitable}
    if not attempt.devices or any((sizes.get(device_id) or 0.0) < most_mb for device_id in attempt.devices):
        return False
    if any(held is None or held > _NOTHING_MB for _, held in lack.others):
        return False
    if attempt.reserved_mb is None:
        return True
    shortage = lack.shortage
    had = attempt.usage.peak_mb if attempt.usage is not None else None
    if shortage.held_mb is not None:
        had = shortage.held_mb + (shortage.free_mb or 0.0)
    return (had or 0.0) >= NEARLY_ALL * most_mb
