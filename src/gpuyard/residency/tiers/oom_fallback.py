"""When a device is out of memory: drop assets that are not in use, step by step, and retry."""

import gc
from collections.abc import Callable
from typing import TypeVar

from gpuyard.errors import DeviceFull
from gpuyard.residency.memory.device_memory import as_device_full
from gpuyard.residency.tiers.asset_tiers import Tiers

T = TypeVar("T")


def retry_with_less(tiers: Tiers, act: Callable[[], T]) -> T:
    """Call `act`; if the device is full, again without idle actors, then without the least recently used idle scene.

    Raises DeviceFull if that is not enough. Nothing is promoted ahead of time meanwhile.
    """
    full, result = _try(act)
    if full is None:
        return result[0]
    with tiers.short():
        for free_memory in (tiers.drop_idle_actors, tiers.evict_idle_scene):
            gc.collect()  # a reference cycle may keep the error, and so the device memory of its frames
            free_memory()
            full, result = _try(act)
            if full is None:
                tiers.reserve_more()
                return result[0]
    raise full


def _try(act: Callable[[], T]) -> tuple[DeviceFull | None, list[T]]:
    """Return the error if the device was full, or the result."""
    try:
        return None, [act()]
    except Exception as error:
        full = as_device_full(error)
        if full is None:
            raise
        return full, []
