"""Rules: what the configuration says about the queue."""

from msgspec import Struct

from gpuyard.core.memory.sizing import FIRST_RUN_PART, SETTLE_S
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.plan import SchedulingLimits


class Rules(Struct, frozen=True, kw_only=True):
    """Settings of the scheduler.

    - `first_run_part`: a job without an estimate starts where this part of a device is free; after it was measured for
      `settle_s` seconds (None: never), others may share its device.
    - `ram_reserve_mb`: RAM that has to stay free when a job is suspended.
    - `engine`: engine of jobs that name none. `shows_uuids`: CUDA_VISIBLE_DEVICES names devices by their UUIDs.
    """

    limits: SchedulingLimits
    max_cpu_percent: float | None = None
    min_free_memory_mb: float | None = None
    packing: Packing = Packing()
    first_run_part: float = FIRST_RUN_PART
    settle_s: float | None = SETTLE_S
    ram_reserve_mb: float = 2048.0
    engine: str = ""
    shows_uuids: bool = False
