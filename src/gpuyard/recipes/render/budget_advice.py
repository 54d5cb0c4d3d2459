"""What budgets a set of assets asks for. Pure.

A scene is had whole; an actor is had whole too, or streamed, which takes two of its frames at a time. What is had of
VRAM is for assets but for a part that the renderer is left with; RAM comes in pages.
"""

import math
from collections.abc import Sequence

import msgspec

from gpuyard.recipes.render.profile_assets import Measured
from gpuyard.residency.memory.page_pool import page_size
from gpuyard.residency.planning.assets import WORKING_PART, Asset, Kind

_MB, _GB = 1 << 20, 1 << 30
_FOR_ASSETS = 1 - 1 / WORKING_PART


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """In bytes. `least` is what works at all; `good` lets work go on; with `plenty`, more would help little."""

    vram_least: int
    vram_good: int
    vram_plenty: int
    ram_least: int
    ram_good: int
    ram_plenty: int


def advise(assets: Sequence[Measured], *, scene_slots: int, workers: int, overhead: int = 0) -> Advice:
    """`overhead` is what the device's allocator takes beside all. Assets of unknown size do not count."""
    scenes, actors = _assets(assets, Kind.SCENE), _assets(assets, Kind.ACTOR)
    stream = max((actor.stream_nbytes for actor in actors), default=0)

    def vram(scene_count: int, actor_count: int) -> int:
        chosen = scenes[:scene_count] + actors[:actor_count]
        return math.ceil((stream + sum(asset.nbytes for asset in chosen)) / _FOR_ASSETS) + overhead

    # No budget here is as large, so its pages are these or smaller ones.
    page = page_size(2 * (sum(asset.nbytes for asset in scenes + actors) + workers * stream))

    def rounded(nbytes: int) -> int:
        return -(-nbytes // page) * page

    def ram(scene_count: int, actor_count: int) -> int:
        return sum(rounded(asset.nbytes) for asset in scenes[:scene_count] + actors[:actor_count])

    # Of each worker, where an actor is larger than RAM and streamed from disk.
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
    """As one would type it, and never less."""
    return f"{math.ceil(nbytes / _GB)}G" if nbytes >= 4 * _GB else f"{math.ceil(nbytes / _MB)}M"


def _assets(measured: Sequence[Measured], kind: Kind) -> list[Asset]:
    """The largest first."""
    known = [
        Asset(key=each.path, kind=kind, nbytes=each.vram_nbytes, frame_nbytes=each.frame_nbytes or 0)
        for each in measured
        if each.kind is kind and each.vram_nbytes is not None
    ]
    return sorted(known, key=lambda asset: asset.nbytes, reverse=True)
