"""Input and output of the transfer plan. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from gpuyard.residency.planning.assets import Asset, Stage, StallCause, Step
from gpuyard.residency.planning.budget_limits import BudgetLimits

NEVER = math.inf


class PlanState(msgspec.Struct, kw_only=True):
    """The state to plan for. `needed` is the place in the order of work where each asset is needed next, from `now`."""

    limits: BudgetLimits
    assets: Mapping[str, Asset]
    ram: Mapping[str, Stage] = {}
    vram: Mapping[str, Stage] = {}
    held: AbstractSet[str] = frozenset()  # in use in VRAM
    held_ram: AbstractSet[str] = frozenset()  # being copied from RAM
    requested: Mapping[str, int] = {}  # workers wait for it: the place of that work, or before all if it holds a scene
    needed: Mapping[str, int] = {}
    ahead: Sequence[tuple[int, str]] = ()  # `needed`, soonest first
    next_after: Callable[[str, float], int | None]  # the next place after a given place where an asset is needed
    refused: AbstractSet[str] = frozenset()  # the device was too full for it: not tried again before a request
    is_short: bool = False  # the device was out of memory just now: nothing is promoted ahead of time
    stream_nbytes: int = 0  # VRAM used by streams
    ram_taken: int = 0  # RAM used by copies and by streams from disk
    readers: int = 1  # number of reads that can start now
    now: int = 0
    rounded: Callable[[int], int] = int  # rounds a size up to whole pages of RAM

    def need_at(self, key: str) -> float:
        return self.requested.get(key, self.needed.get(key, NEVER))


class TransferPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in order, what each requested asset waits for, and the actors to stream now."""

    steps: tuple[Step, ...]
    waits: dict[str, StallCause]
    streams: frozenset[str]
