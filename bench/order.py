"""Gigabytes read and uploaded in the manifest's order, sorted by scene and actor, and in the chosen order, compared to
the minimum (each asset once). Counted by `moved`, with budgets that hold a part of the assets.

    python -m bench order [seeds]
"""

import time
from collections.abc import Callable, Iterable, Sequence
from random import Random

from gpuyard.recipes.render.planning.assets_and_units import Asset, Budgets, Kind, Label, Unit
from gpuyard.recipes.render.planning.unit_order import MovedBytes, choose_order, moved

_GB = 1 << 30
_SCENE_GB, _ACTOR_GB = 3, 2
_BUDGETS = Budgets(vram=30 * _GB, ram=30 * _GB, scene_slots=5)
_LABELS = 5
_HEAD = (
    f"{'read + uploaded, GB':<40} {'units':>6}  {'manifest':>15}  {'sorted':>15}  {'chosen':>15}  {'least':>15}      s"
)
Pairs = list[tuple[str, str]]


def bench_order(arguments: Sequence[str]) -> None:
    for seed in map(int, arguments or ["1"]):
        print(f"seed {seed}; VRAM 30 GB, RAM 30 GB, 5 scenes at a time; scenes of 3 GB, actors of 2 GB")
        print(_HEAD)
        for name, draw in SHAPES.items():
            _row(name, draw(Random(seed)), _uniform)
        _row("sparse 40 x 40, actors of 1 to 8 GB", _sparse(Random(seed)), _mixed)
        _row("20 x 20, 4 workers", _product(20, Random(seed)), _uniform, workers=4)
        _row("100 x 100", _product(100, Random(seed)), _uniform)


def _product(size: int, random: Random) -> Pairs:
    return _shuffled(((f"scene{s}", f"actor{a}") for s in range(size) for a in range(size)), random)


def _sparse(random: Random) -> Pairs:
    return [pair for pair in _product(40, random) if random.random() < 0.2]


def _one_for_all(random: Random) -> Pairs:
    return _shuffled(((f"scene{s}", a) for s in range(40) for a in ("shared", f"actor{s % 20}")), random)


def _own(random: Random) -> Pairs:
    return _shuffled(((f"scene{s}", f"actor{s}-{a}") for s in range(20) for a in range(3) for _ in range(4)), random)


def _one_per_line(random: Random) -> Pairs:
    return _shuffled(_product(20, random) * _LABELS, random)


SHAPES: dict[str, Callable[[Random], Pairs]] = {
    "20 x 20": lambda random: _product(20, random),
    "sparse 40 x 40, one pair in five": _sparse,
    "one actor for all 40 scenes, 20 others": _one_for_all,
    "20 scenes with 3 actors of their own": _own,
    "20 x 20, one label per line": _one_per_line,
}


def _shuffled(pairs: Iterable[tuple[str, str]], random: Random) -> Pairs:
    drawn = list(pairs)
    random.shuffle(drawn)
    return drawn


def _uniform(key: str) -> int:
    return (_SCENE_GB if key.startswith("scene") else _ACTOR_GB) * _GB


def _mixed(key: str) -> int:
    return _uniform(key) if key.startswith("scene") else Random(key).randint(_GB, 8 * _GB)


def _row(name: str, pairs: Pairs, size: Callable[[str], int], workers: int = 1) -> None:
    units = [
        Unit(scene=s, actor=a, labels=(Label(name=str(n), value=None),) * _LABELS) for n, (s, a) in enumerate(pairs)
    ]
    assets = {key: _asset(key, size(key)) for pair in pairs for key in pair}
    started = time.perf_counter()
    chosen = choose_order(units, assets, _BUDGETS, workers=workers)
    taken = time.perf_counter() - started
    by_scene = sorted(units, key=lambda unit: (unit.scene, unit.actor))
    figures = [_text(moved(order, assets, _BUDGETS, workers=workers)) for order in (units, by_scene, chosen)]
    once = sum(asset.nbytes for asset in assets.values())
    figures.append(_text(MovedBytes(read_bytes=once, uploaded_bytes=once)))
    print(f"{name:<40} {len(units):>6}  {'  '.join(figures)}  {taken:5.2f}", flush=True)


def _asset(key: str, nbytes: int) -> Asset:
    return Asset(key=key, kind=Kind.SCENE if key.startswith("scene") else Kind.ACTOR, nbytes=nbytes)


def _text(figures: MovedBytes) -> str:
    return f"{figures.read_bytes / _GB:>6.0f} + {figures.uploaded_bytes / _GB:>6.0f}"
