"""The bound of the disk in `python -m bench.residency`: how long the card idles if only reading and kernels take time.

    python -m bench.disk_bound [--read-gb-s 1.6,1.9,2.1] [--picture-ms 1.545]

Needs neither files nor a card. Assets are read in the order in which they are needed first, without pause. A unit is
rendered when both of its assets are read. At the start, each asset that is read makes only a few units possible, so the
card waits for the disk whatever else is overlapped.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence

from bench.residency_data import Shape, entries
from gpuyard.recipes.render.planning.assets_and_units import (
    DEFAULT_WORKERS,
    WORKING_PART,
    Asset,
    Budgets,
    Kind,
    Label,
    Unit,
    keys_of,
)
from gpuyard.recipes.render.planning.unit_order import choose_order

_GB, _MB = 1 << 30, 1 << 20
_VRAM, _RAM = 12 * _GB, 20 * _GB  # as in `bench.residency`


def work(shape: Shape) -> tuple[list[Unit], dict[str, Asset]]:
    """Return the units in the order in which gpuyard renders them, and their assets by key."""
    units, assets = [], {}
    for entry in entries(shape):
        scene, actor, labels = str(entry["scene"]), str(entry["actor"]), entry["labels"]
        assert isinstance(labels, list)
        assets[scene] = Asset(key=scene, kind=Kind.SCENE, nbytes=round(shape.scene_mb * _MB))
        frame = round(shape.frame_mb * _MB)
        assets[actor] = Asset(key=actor, kind=Kind.ACTOR, nbytes=frame * shape.frames, frame_nbytes=frame)
        its = tuple(Label(name=label["name"], value=label) for label in labels)
        units.append(Unit(scene=scene, actor=actor, labels=its))
    budgets = Budgets(vram=_VRAM, ram=_RAM, working=_VRAM // WORKING_PART)
    return choose_order(units, assets, budgets, workers=DEFAULT_WORKERS), assets


def idle_s(units: Sequence[Unit], assets: Mapping[str, Asset], bytes_per_s: float, label_s: float) -> float:
    """Return how long the card waits for the disk in this order, the wait for the first unit not included."""
    read_at: dict[str, float] = {}
    nbytes, now, idle = 0, 0.0, 0.0
    for place, unit in enumerate(units):
        for key in keys_of(unit):
            if key not in read_at:
                nbytes += assets[key].nbytes
                read_at[key] = nbytes / bytes_per_s
        ready = max((read_at[key] for key in keys_of(unit)), default=0.0)
        if place:
            idle += max(0.0, ready - now)
        now = max(now, ready) + label_s * len(unit.labels)
    return idle


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.disk_bound")
    parser.add_argument("--read-gb-s", default="1.6,1.9,2.1", help="speeds of the disk")
    parser.add_argument("--picture-ms", type=float, default=1.545, help="time that the card is busy with a picture")
    options = parser.parse_args(arguments)
    shape = Shape()
    label_s = options.picture_ms / 1e3 * shape.views
    units, assets = work(shape)
    print(f"{'disk':>10}{'reading':>10}{'kernels':>10}{'card waits':>12}")
    for speed in map(float, options.read_gb_s.split(",")):
        idle = idle_s(units, assets, speed * _GB, label_s)
        reading, kernels = shape.nbytes / _GB / speed, label_s * shape.labels
        print(f"{speed:5.1f} GB/s{reading:8.1f} s{kernels:8.1f} s{idle:10.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
