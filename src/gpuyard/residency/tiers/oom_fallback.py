"""When a device is out of memory: drop what is not in use, and try again, step by step."""

import gc
from collections.abc import Callable
from typing import TypeVar

from gpuyard.errors import DeviceFull
from gpuyard.residency.memory.device_memory import as_device_full
from gpuyard.residency.tiers.asset_tiers import Tiers

T = TypeVar("T")


def climb(tiers: Tiers, act: Callable[[], T]) -> T:
    """Does it, and again without the idle actors, and again without the idle scene that was used longest ago.

    DeviceFull where that is not enough. Nothing is promoted ahead of time until it is through.
    """
    full, result = _tried(act)
    if full is None:
        return result[0]
    with tiers.short():
        for rung in (tiers.drop_idle_actors, tiers.evict_idle_scene):
            gc.collect()  # what was raised may be kept by a circle, and with it what its frames had on the device
            rung()
            full, result = _tried(act)
            if full is None:
                tiers.leave_more()
                return result[0]
    raise full


def _tried(act: Callable[[], T]) -> tuple[DeviceFull | None, list[T]]:
    """Why the device was full, or what it gave."""
    try:
        return None, [act()]
    except Exception as error:
        full = as_device_full(error)
        if full is None:
            raise
        return full, []
