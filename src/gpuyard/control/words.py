"""What the controller is told and what it tells: values only."""

from msgspec import Struct

from gpuyard.core.model import Snapshot
from gpuyard.core.policy import Limits
from gpuyard.core.reasons import Reason


class Rules(Struct, frozen=True, kw_only=True):
    """What the configuration says about the queue."""

    limits: Limits
    max_cpu_percent: float | None = None
    min_free_memory_mb: float | None = None


class Look(Struct, frozen=True, kw_only=True):
    """The machine as it was seen; `cpu_percent` is smoothed."""

    snapshot: Snapshot
    cpu_percent: float | None = None


class Step(Struct, frozen=True, kw_only=True):
    """When the next step is due though nothing happens; whether a job waits for what others hold, or for what only a
    look at the machine can tell."""

    wake_at: float | None
    waits_for_room: bool
    waits_for_look: bool
    started: int


class Explanation(Struct, frozen=True, kw_only=True):
    """The reasons are those of the first job of its lane, `first_id`; `ahead` of it stand so many of that lane."""

    reasons: tuple[Reason, ...]
    first_id: int
    ahead: int
    starts_at: float | None
