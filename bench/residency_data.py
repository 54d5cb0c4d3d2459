"""Scenes and actors for the residency benchmark: Gaussian splats in binary PLY, and a manifest of labels.

Files are synced to disk when they are made, and dropped from the page cache before each pass.
"""

import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

_MB = 1048576
_BLOCK_NBYTES = 32 * _MB
_WRITERS = 8
_SPLAT = (
    "x", "y", "z", "nx", "ny", "nz", "f_dc_0", "f_dc_1", "f_dc_2", "opacity", "scale_0", "scale_1", "scale_2",
    "rot_0", "rot_1", "rot_2", "rot_3",
)  # fmt: skip
_SCENE = (*_SPLAT, *(f"f_rest_{number}" for number in range(45)))


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Number and size of the files; the same shape gives the same files."""

    scenes: int = 20
    scene_mb: float = 1000
    actors: int = 20
    frames: int = 30
    frame_mb: float = 20
    pairs: int = 200
    labels: int = 2000
    views: int = 8

    @property
    def nbytes(self) -> int:
        return int((self.scenes * self.scene_mb + self.actors * self.frames * self.frame_mb) * _MB)


def make(folder: Path, shape: Shape) -> None:
    """Write all files and the manifest. Does nothing if the folder has files of the same shape."""
    done = folder / "shape.json"
    if done.exists() and msgspec.json.decode(done.read_bytes(), type=Shape) == shape:
        return
    for name in ("scenes", "actors"):
        shutil.rmtree(folder / name, ignore_errors=True)
    jobs = [(folder / "scenes" / f"{n}.ply", _SCENE, shape.scene_mb, n) for n in range(shape.scenes)]
    for n in range(shape.actors):
        for frame in range(shape.frames):
            seed = 1000 * (n + 1) + frame
            jobs.append((folder / "actors" / str(n) / f"{frame}.ply", _SPLAT, shape.frame_mb, seed))
    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(lambda job: _write(*job), jobs))
    (folder / "manifest.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries(shape)))
    done.write_bytes(msgspec.json.encode(shape))


def _write(path: Path, properties: tuple[str, ...], megabytes: float, seed: int) -> None:
    """Write one block of random splats repeatedly, each time scaled, since random numbers are slower than a disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = int(megabytes * _MB) // (4 * len(properties))
    block = _block(min(rows, _BLOCK_NBYTES // (4 * len(properties))), len(properties), seed)
    lines = ["ply", "format binary_little_endian 1.0", f"element vertex {rows}"]
    header = "\n".join([*lines, *(f"property float {name}" for name in properties), "end_header", ""])
    with open(path, "wb", buffering=0) as file:
        file.write(header.encode())
        while rows:
            part = block[:rows]
            file.write(part.data)
            rows -= len(part)
            block[:, :3] *= -0.97
        os.fsync(file.fileno())


def _block(rows: int, columns: int, seed: int) -> npt.NDArray[np.float32]:
    block = np.random.default_rng(seed).random((rows, columns), np.float32)
    block[:, :3] = block[:, :3] * 2 - 1
    return block


def entries(shape: Shape) -> list[dict[str, object]]:
    """Return labels over random pairs of a scene and an actor, the same number per scene, in random order."""
    chance = random.Random(8)
    pairs = []
    for place in range(shape.pairs):
        scene = place % shape.scenes
        actors = [n for n in range(shape.actors) if (scene, n) not in pairs]
        pairs.append((scene, chance.choice(actors)))
    chance.shuffle(pairs)
    labels: dict[tuple[int, int], list[dict[str, object]]] = {pair: [] for pair in pairs}
    for n in range(shape.labels):
        labels[pairs[n % len(pairs)]].append({"name": f"label-{n}", "turn": n, "views": shape.views})
    return [
        {"scene": f"scenes/{scene}.ply", "actor": f"actors/{actor}", "labels": its}
        for (scene, actor), its in labels.items()
    ]


def drop_from_cache(folder: Path) -> None:
    """Drop all files from the page cache, so that the next pass reads them from disk."""
    for path in folder.glob("**/*.ply"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
