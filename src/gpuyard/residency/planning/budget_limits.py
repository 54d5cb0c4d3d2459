"""How much room there is for what, from budgets and sizes. Pure."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from gpuyard.residency.planning.assets import Asset, Budgets, Kind


class BudgetLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from the budgets and the sizes: how much of VRAM is for what."""

    vram: int  # for scenes, actors, and streams beyond the first
    actors: int
    stream: int  # kept for one stream, beside `vram`
    ram: int
    exchange: int  # of `ram`, where what leaves VRAM goes while something else leaves RAM
    scene_slots: int


def limits_of(assets: Iterable[Asset], budgets: Budgets) -> BudgetLimits:
    """With the largest scenes in all slots, the actors' part is still free."""
    known = list(assets)
    streams = (asset.stream_nbytes for asset in known if asset.kind is Kind.ACTOR)
    stream = max((nbytes for nbytes in streams if nbytes <= budgets.vram_for_assets), default=0)
    largest = sorted((asset.nbytes for asset in known if asset.kind is Kind.SCENE), reverse=True)
    vram = max(0, budgets.vram_for_assets - stream)
    actors = max(0, vram - sum(largest[: budgets.scene_slots]))
    return BudgetLimits(
        vram=vram,
        actors=actors,
        stream=stream,
        ram=budgets.ram,
        exchange=min(max((asset.nbytes for asset in known), default=0), budgets.ram // 4),
        scene_slots=budgets.scene_slots,
    )


def cannot_fit(asset: Asset, limits: BudgetLimits, rounded: Callable[[int], int]) -> str | None:
    """Why it can never be had within these limits, however long one waits."""
    if asset.kind is Kind.ACTOR:
        if asset.stream_nbytes > limits.stream:
            return f"{asset.path}: two of its frames are more than the VRAM budget leaves"
        fits = min(rounded(asset.nbytes), asset.stream_ram(rounded)) <= limits.ram
        return None if fits else f"{asset.path}: two of its frames are more than the RAM budget"
    if asset.nbytes > limits.vram:
        return f"{asset.path} is larger than what the VRAM budget leaves"
    return None if rounded(asset.nbytes) <= limits.ram else f"{asset.path} is larger than the RAM budget"


class BudgetRoom(NamedTuple):
    """Slots for scenes, bytes of VRAM, and bytes of the actors' part of it."""

    slots: int
    total: int
    actors: int

    @classmethod
    def of(cls, asset: Asset) -> "BudgetRoom":
        is_scene = asset.kind is Kind.SCENE
        return cls(int(is_scene), asset.nbytes, 0 if is_scene else asset.nbytes)

    @classmethod
    def taken(cls, assets: Iterable[Asset]) -> "BudgetRoom":
        """By all of them."""
        slots = total = actors = 0
        for asset in assets:
            is_scene = asset.kind is Kind.SCENE
            slots += is_scene
            total += asset.nbytes
            actors += 0 if is_scene else asset.nbytes
        return cls(slots, total, actors)

    def __add__(self, other: "BudgetRoom") -> "BudgetRoom":  # type: ignore[override]
        return BudgetRoom(self.slots + other.slots, self.total + other.total, self.actors + other.actors)

    def __sub__(self, other: "BudgetRoom") -> "BudgetRoom":
        return BudgetRoom(self.slots - other.slots, self.total - other.total, self.actors - other.actors)

    def __mul__(self, times: int) -> "BudgetRoom":  # type: ignore[override]
        return BudgetRoom(self.slots * times, self.total * times, self.actors * times)

    @property
    def is_more_than_nothing(self) -> bool:
        return max(self) > 0
