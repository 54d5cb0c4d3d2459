"""What the controller is told and what it tells: values only."""

from msgspec import Struct

from gpuyard.core.job.published_events import PublishedEvent
from gpuyard.core.memory.sizing import FIRST_RUN_PART, SETTLE_S
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.plan import SchedulingLimits
from gpuyard.core.scheduling.wait_reasons import Reason


class Rules(Struct, frozen=True, kw_only=True):
    """What the configuration says about the queue. A job of which nothing is known starts where a `first_run_part` of a
    device is free, and is joined once it has been seen for `settle_s`; to suspend one leaves `ram_reserve_mb` of RAM.
    Those that name no `engine` go to this one. With `shows_uuids`, CUDA_VISIBLE_DEVICES names devices by their UUIDs.
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


class Step(Struct, frozen=True, kw_only=True):
    """When the next step is due though nothing happens; whether a job waits for what others hold, or for what only a
    look at the machine can tell. `news` is of this step, and of what was asked for since the last one."""

    wake_at: float | None
    waits_for_devices: bool
    waits_for_sample: bool
    started: int
    events: tuple[PublishedEvent, ...] = ()


class Explanation(Struct, frozen=True, kw_only=True):
    """The reasons are those of the first job of its lane, `first_id`; `ahead` of it stand so many of that lane."""

    reasons: tuple[Reason, ...]
    first_id: int
    ahead: int
    starts_at: float | None
