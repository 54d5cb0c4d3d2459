"""Recommend VRAM and RAM budgets for a set of assets. Pure.

A scene is loaded whole; an actor is loaded whole or streamed, which takes two of its frames at a time. A part of VRAM
is reserved for the renderer, the rest is for assets; RAM is allocated in pages.
"""

import math
from collections.abc import Sequence

import msgspec

from gpuyard.recipes.render.profile_assets import AssetProfile
from gpuyard.residency.memory.page_pool import page_size
from gpuyard.residency.planning.assets import WORKING_PART, Asset, Kind

_MB, _GB = 1 << 20, 1 << 30
_FOR_ASSETS = 1 - 1 / WORKING_PART


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Budgets in bytes. `least` is the minimum; with `good`, workers rarely wait; more than `plenty` helps little."""

    vram_least: int
    vram_good: int
    vram_plenty: int
    ram_least: int
    ram_good: int
    ram_plenty: int


def advise(assets: Sequence[AssetProfile], *, scene_slots: int, workers: int, overhead: int = 0) -> Advice:
    """Return the budgets. `overhead` is memory of the device's own allocator. Assets of unknown size are left out."""
    scenes, actors = _assets(assets, Kind.SCENE), _assets(assets, Kind.ACTOR)
    stream = max((actor.stream_nbytes for actor in actors), default=0)

    def vram(scene_count: int, actor_count: int) -> int:
        chosen = scenes[:scene_count] + actors[:actor_count]
        return math.ceil((stream + sum(asset.nbytes for asset in chosen)) / _FOR_ASSETS) + overhead

    # Larger than any budget below, so that pages of the actual budget are not larger than this.
    page = page_size(2 * (sum(asset.nbytes for asset in scenes + actors) + workers * stream))

    def rounded(nbytes: int) -> int:
        return -(-nbytes // page) * page

    def ram(scene_count: int, actor_count: int) -> int:
        return sum(rounded(asset.nbytes) for asset in scenes[:scene_count] + actors[:actor_count])

    # Each worker needs this to stream an actor from disk that does not fit into RAM.
    ram_least = ram(1, 0) + workers * max((actor.stream_ram(rounded) for actor in actors), default=0)
    return Advice(
        vram_least=vram(1, 0),
        vram_good=vram(scene_slots, 1),
        vram_plenty=vram(scene_slots, workers),
        ram_least=ram_least,
        ram_good=max(ram_least, ram(scene_slots + 1, workers + 1)),
        ram_plenty=max(ram_least, ram(len(scenes), len(actors))),
    )


def size_option(nbytes: int) -> str:
    """Return the size as an option's value, rounded up."""
    return f"{math.ceil(nbytes / _GB)}G" if nbytes >= 4 * _GB else f"{math.ceil(nbytes / _MB)}M"


def _assets(measured: Sequence[AssetProfile], kind: Kind) -> list[Asset]:
    """Return the assets of a kind with a known size, the largest first."""
    known = [
        Asset(key=each.path, kind=kind, nbytes=each.vram_nbytes, frame_nbytes=each.frame_nbytes or 0)
        for each in measured
        if each.kind is kind and each.vram_nbytes is not None
    ]
    return sorted(known, key=lambda asset: asset.nbytes, reverse=True)
