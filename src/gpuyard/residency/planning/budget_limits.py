"""Limits for scenes, actors and streams, computed from budgets and asset sizes. Pure."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from gpuyard.residency.planning.assets import Asset, Budgets, Kind


class BudgetLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by purpose."""

    vram: int  # for scenes, actors, and streams beyond the first
    actors: int
    stream: int  # reserved for one stream, in addition to `vram`
    ram: int
    exchange: int  # part of `ram` for an asset that leaves VRAM while another enters it
    scene_slots: int


def limits_of(assets: Iterable[Asset], budgets: Budgets) -> BudgetLimits:
    """Return the limits. The actors' part stays free even with the largest scenes in all slots."""
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
    """Return why the asset can never fit into these limits, or None if it can."""
    if asset.kind is Kind.ACTOR:
        if asset.stream_nbytes > limits.stream:
            return f"{asset.path}: two of its frames are larger than the VRAM budget for assets"
        fits = min(rounded(asset.nbytes), asset.stream_ram(rounded)) <= limits.ram
        return None if fits else f"{asset.path}: two of its frames are larger than the RAM budget"
    if asset.nbytes > limits.vram:
        return f"{asset.path} is larger than the VRAM budget for assets"
    return None if rounded(asset.nbytes) <= limits.ram else f"{asset.path} is larger than the RAM budget"


class VramAmount(NamedTuple):
    """Scene slots, bytes of VRAM, and bytes of the actors' part of it."""

    slots: int
    total: int
    actors: int

    @classmethod
    def of(cls, asset: Asset) -> "VramAmount":
        is_scene = asset.kind is Kind.SCENE
        return cls(int(is_scene), asset.nbytes, 0 if is_scene else asset.nbytes)

    @classmethod
    def sum_of(cls, assets: Iterable[Asset]) -> "VramAmount":
        return sum(map(cls.of, assets), start=cls(0, 0, 0))

    def __add__(self, other: "VramAmount") -> "VramAmount":  # type: ignore[override]
        return VramAmount(self.slots + other.slots, self.total + other.total, self.actors + other.actors)

    def __sub__(self, other: "VramAmount") -> "VramAmount":
        return VramAmount(self.slots - other.slots, self.total - other.total, self.actors - other.actors)

    def __mul__(self, times: int) -> "VramAmount":  # type: ignore[override]
        return VramAmount(self.slots * times, self.total * times, self.actors * times)

    @property
    def is_positive(self) -> bool:
        return max(self) > 0
