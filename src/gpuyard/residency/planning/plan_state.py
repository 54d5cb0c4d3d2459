"""What the plan is made from, and what it says. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from gpuyard.residency.planning.assets import Asset, Stage, StallCause, Step
from gpuyard.residency.planning.budget_limits import BudgetLimits

NEVER = math.inf


class PlanState(msgspec.Struct, kw_only=True):
    """The world at a moment. `needed` is where in the order of work each asset is needed next, from `now` on."""

    limits: BudgetLimits
    assets: Mapping[str, Asset]
    ram: Mapping[str, Stage] = {}
    vram: Mapping[str, Stage] = {}
    held: AbstractSet[str] = frozenset()  # in VRAM, and in use
    held_ram: AbstractSet[str] = frozenset()  # in RAM, and being copied from
    asked: Mapping[str, int] = {}  # somebody waits for it: where that work is, or before all where it holds its scene
    needed: Mapping[str, int] = {}
    ahead: Sequence[tuple[int, str]] = ()  # the same, soonest first
    next_after: Callable[[str, float], int | None]  # where it is needed next after a place
    refused: AbstractSet[str] = frozenset()  # the device had no room for it: not again before it is asked for
    is_short: bool = False  # memory was short just now: nothing is promoted ahead of time
    stream_nbytes: int = 0  # taken by streams
    ram_taken: int = 0  # of RAM, by copies and by streams from disk
    readers: int = 1  # reads that can begin now
    now: int = 0
    rounded: Callable[[int], int] = int  # what so many bytes take in RAM

    def need_at(self, key: str) -> float:
        return self.asked.get(key, self.needed.get(key, NEVER))


class TransferPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in their order, why what is asked for is not there yet, and the actors that are to be streamed now."""

    steps: tuple[Step, ...]
    waits: dict[str, StallCause]
    streams: frozenset[str]
