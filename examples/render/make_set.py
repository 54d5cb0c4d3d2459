"""Create a small set to render: six scenes and four moving actors as PLY files, and a manifest of 60 labels.

    python make_set.py [FOLDER]

The set is the same each time. x points to the right, y to the back, z up; actors pass in front of the centre.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from math import cos, pi, sin
from pathlib import Path
from typing import Any

import numpy as np
from shapes import (
    VERTEX,
    Cloud,
    Floats,
    Paint,
    ball,
    bands,
    box,
    checks,
    choose,
    cloud,
    grid,
    ground,
    hue,
    knot,
    plain,
    rectangle,
    rgb,
    ring,
    rod,
)

FRAMES = 12


# Scenes


def away_from_actors(x: Floats, y: Floats) -> Floats:
    """Return 0 on the path of the actors, rising to 1 far from it."""
    away = np.hypot(np.maximum(np.abs(x) - 2.5, 0), np.maximum(np.abs(y + 0.6) - 0.7, 0)) / 2.5
    return np.clip(away, 0, 1) ** 2 * (3 - 2 * np.clip(away, 0, 1))


def gallery() -> list[Cloud]:
    wall = bands("2f6f73", "34777b", 0.5, axis=0)
    parts = [
        rectangle((-5, -4, 0), (10, 0, 0), (0, 8, 0), checks("e9e2d3", "7d7468", 1.0)),
        rectangle((-5, 4, 0), (10, 0, 0), (0, 0, 3.6), wall),
        rectangle((-5, -4, 0), (0, 8, 0), (0, 0, 3.6), bands("c98f4e", "c4894a", 0.5, axis=1)),
        knot((0, 2.6, 2.25), 0.85, 0.16),
        ball((-3, 2.2, 1.75), 0.6, bands("d8b23c", "b3541e", 0.24)),
        ring((3, 2.2, 2.0), 0.62, 0.24, plain("c8324a"), tilt=1.2),
    ]
    return parts + [box((x, y, 0.55), (1.2, 1.2, 1.1), plain("f2efe8")) for x, y in ((-3, 2.2), (0, 2.6), (3, 2.2))]


def hills() -> list[Cloud]:
    def height(x: Floats, y: Floats) -> Floats:
        wave = 0.9 * np.sin(0.9 * x + 0.6) * np.cos(0.7 * y) + 0.35 * np.sin(2.3 * x - 1.1 * y)
        front = np.clip(1 + (y + 1) / 4, 0.15, 1)  # low in front, where the cameras are
        return away_from_actors(x, y) * front * (0.75 + wave + 0.22 * np.maximum(y, 0))

    def paint(at: Floats) -> Any:
        tones = np.array([rgb(tone) for tone in ("5d8f3f", "7fa84a", "9aa05a", "8b8378", "f4f6f8")])
        place = np.clip(at[:, 2] * 1.45, 0, 3.99)
        low = place.astype(int)
        return tones[low] + (tones[low + 1] - tones[low]) * (place - low)[:, None]

    parts = [ground(height, 11, paint)]
    for x, y in ((-4.2, 0.2), (-3.3, 2.2), (-1.7, 2.6), (0.4, 2.4), (2.2, 2.9), (3.9, 1.6), (4.4, -1.6), (-4.4, -2.4)):
        foot = float(height(np.array([x]), np.array([y]))[0])
        parts.append(rod((x, y, foot), (x, y, foot + 0.6), 0.08, plain("6b4a2f")))
        parts += [ball((x, y, foot + 0.8 + 0.38 * i), 0.46 - 0.13 * i, plain("2f6b3a")) for i in range(3)]
    return parts


def temple() -> list[Cloud]:
    marble, parts = bands("efe9dc", "e2d9c6", 0.35), []
    floor = rectangle((-5, -5, 0), (10, 0, 0), (0, 10, 0), checks("d9c7a3", "b99d72", 0.5))
    parts.append(floor[np.hypot(floor["x"], floor["y"]) < 4.9])
    for number in range(12):
        x, y = 4 * cos(pi * number / 6 + 0.26), 4 * sin(pi * number / 6 + 0.26)
        parts.append(rod((x, y, 0.2), (x, y, 2.6), 0.22, marble))
        parts += [box((x, y, z), (0.66, 0.66, 0.2), marble) for z in (0.1, 2.75)]
    parts.append(ring((0, 0, 3.0), 4, 0.2, plain("d8cdb6")))
    parts.append(ball((0, 1.6, 1.0), 0.95, bands("3a5fa8", "e8c15a", 0.19)))
    return parts


def town() -> list[Cloud]:
    walls = ("c96f4a", "d9b36c", "8fa3b3", "b5655d", "e3d5b8", "7c8f6a")

    def windows(wall: str) -> Paint:
        def paint(at: Floats) -> Any:
            across, up = (at[:, 0] + at[:, 1]) % 0.4, at[:, 2] % 0.5
            is_window = (across > 0.12) & (across < 0.3) & (up > 0.15) & (up < 0.38)
            return choose(is_window, "2b3440", wall)

        return paint

    parts = [rectangle((-5, -4.5, 0), (10, 0, 0), (0, 9, 0), checks("777b80", "70747a", 0.6))]
    for number, (column, row) in enumerate(itertools.product(range(5), range(2))):
        high = 1.0 + 0.5 * ((number * 7) % 5)
        middle = (-4 + 2 * column, 1.5 + 1.9 * row, high / 2)
        parts.append(box(middle, (1.3, 1.2, high), windows(walls[number * 5 % 6])))
    for x in (-4.5, -2.7, 2.7, 4.5):
        parts += [
            rod((x, -2.2, 0), (x, -2.2, 0.6), 0.06, plain("6b4a2f")),
            ball((x, -2.2, 0.95), 0.45, plain("4f8a45")),
        ]
    return parts


def rings() -> list[Cloud]:
    parts = [rectangle((-5, -4.5, 0), (10, 0, 0), (0, 9, 0), checks("3b3f54", "45495f", 1.0))]
    for number in range(7):
        middle = (-3.6 + 1.2 * number, 1.9, 1.05)
        parts.append(ring(middle, 0.85, 0.14, hue(number / 7), tilt=0.5 + 1.5 * (number % 2)))
    parts.append(ring((0, 3.2, 2.2), 1.9, 0.18, plain("f0ead8"), tilt=pi / 2))
    return parts + [ball((x, -2.6, 0.3), 0.3, plain("f0ead8")) for x in (-4.2, 4.2)]


def dunes() -> list[Cloud]:
    def height(x: Floats, y: Floats) -> Floats:
        along = 0.8 * x + 0.6 * y
        wave, ripple = np.sin(1.25 * along + 0.5 * np.sin(0.8 * y)), np.sin(9 * along + 2 * np.sin(1.3 * x))
        high: Floats = away_from_actors(x, y) * (0.45 + 0.4 * wave + 0.1 * np.maximum(y, 0)) + 0.02 * ripple
        return high

    parts = [ground(height, 11, lambda at: rgb("e0b878") + 0.09 * np.sin(9 * (0.8 * at[:, :1] + 0.6 * at[:, 1:2])))]
    for number in range(14):
        turn, far = 2.4 * number, 0.35 + 0.62 * number**0.5
        x, y, radius = 1.35 * far * cos(turn), 2.2 + far * sin(turn), 0.62 - 0.03 * number
        parts.append(ball((x, y, 0.55 + radius / 2), radius, hue(number / 14)))
    return parts


# Actors: each function takes a time from 0 to 1


def walker(time: float) -> list[Cloud]:
    x, y, swing = -2.4 + 4.8 * time, -0.9, sin(6 * pi * time)
    skin, shirt, trousers, step = plain("e0a988"), plain("d8423c"), plain("2c3e66"), 0.03
    lift = 0.05 * abs(cos(6 * pi * time))
    hip, neck = (x, y, 0.82 + lift), (x + 0.05, y, 1.42 + lift)
    parts = [rod(hip, neck, 0.17, shirt, step), ball((x + 0.08, y, 1.75 + lift), 0.19, skin, step)]
    for side, way in ((-1, swing), (1, -swing)):
        knee = (x + 0.22 * way + 0.06, y + 0.11 * side, 0.44 + lift)
        foot = (x + 0.42 * way - 0.10 * max(0, -way), y + 0.11 * side, 0.09 + 0.16 * max(0, way) * (1 - abs(way)))
        elbow = (x - 0.2 * way, y + 0.27 * side, 1.12 + lift)
        hand = (x - 0.34 * way + 0.10, y + 0.27 * side, 0.88 + lift)
        parts += [rod(hip, knee, 0.10, trousers, step), rod(knee, foot, 0.085, trousers, step)]
        parts += [rod((x + 0.04, y + 0.2 * side, 1.38 + lift), elbow, 0.075, shirt, step)]
        parts += [rod(elbow, hand, 0.06, skin, step)]
    return parts


def spinner(time: float) -> list[Cloud]:
    return [knot((-2.1 + 4.2 * time, -0.7, 1.0), 0.62, 0.13, turn=2 * pi * time, step=0.03)]


def bouncer(time: float) -> list[Cloud]:
    beat = 3 * time % 1
    high = 1.7 * 4 * beat * (1 - beat)
    squash = 1 - 0.3 * max(0.0, 1 - high / 0.25)
    x, radius = -2.5 + 5 * time, 0.42

    def paint(at: Floats) -> Any:
        across, up = at[:, 0] - x, at[:, 2] - high - radius * squash
        turn = np.arctan2(up, across) / (2 * pi) + 0.9 * time
        return choose(np.floor(turn * 8) % 2 == 0, "f2f2ee", "e8452c")

    return [ball((x, -0.8, high + radius * squash), radius, paint, 0.025, squash)]


def butterfly(time: float) -> list[Cloud]:
    x, y, z = -2.2 + 4.4 * time, -0.9 + 0.5 * sin(2 * pi * time), 1.35 + 0.3 * sin(4 * pi * time)
    flap, lean = (
        0.7 * sin(8 * pi * time) + 0.35,
        np.array([[1, 0, 0], [0, cos(0.7), -sin(0.7)], [0, sin(0.7), cos(0.7)]]),
    )
    parts = [rod((x - 0.28, y, z), (x + 0.3, y, z), 0.055, plain("2a2320"), 0.025)]
    u, v = grid(1.0, 1.0, 0.02)
    along, out = 1.2 * u - 0.55, 0.9 * v
    fore, hind = (
        ((along - 0.24) / 0.36) ** 2 + ((out - 0.4) / 0.44) ** 2,
        ((along + 0.2) / 0.3) ** 2 + (out / 0.58) ** 2,
    )
    edge = np.minimum(fore, hind)
    along, out, edge = (part[edge < 1] for part in (along, out, edge))
    spots = (np.hypot(along - 0.26, out - 0.5) < 0.12) | (np.hypot(along + 0.24, out - 0.3) < 0.1)
    colours = np.where((edge > 0.74)[:, None], rgb("1f1a24"), choose(spots, "fff3c4", "f08a24"))
    for side, face in itertools.product((-1, 1), (-1, 1)):
        # Lean towards the front, so that the cameras see the wings from above.
        wing = lean @ (0.0, side * cos(flap), sin(flap))
        normal = face * lean @ (0.0, -side * sin(flap), cos(flap))
        points = np.stack([x + along, y + out * wing[1], z + out * wing[2]], 1)
        parts.append(cloud(points + 0.004 * normal, np.broadcast_to(normal, points.shape), lambda _: colours, 0.025))
    return parts


# The set

SCENES: dict[str, Callable[[], list[Cloud]]] = {
    "gallery": gallery, "hills": hills, "temple": temple, "town": town, "rings": rings, "dunes": dunes,
}  # fmt: skip
ACTORS: dict[str, Callable[[float], list[Cloud]]] = {
    "walker": walker, "spinner": spinner, "bouncer": bouncer, "butterfly": butterfly,
}  # fmt: skip


def camera(number: int) -> dict[str, Any]:
    turn = pi * (-0.5 + 0.27 * sin(2.4 * number + 1))
    away, height = 8.6 + 0.9 * sin(1.7 * number), 2.9 + 1.1 * cos(2.9 * number)
    eye = (away * cos(turn), away * sin(turn), height)
    return {"eye": [round(part, 3) for part in eye], "target": [0, 0.4, 1.0], "fov": 42}


def write_ply(path: Path, parts: list[Cloud]) -> None:
    vertices = np.concatenate(parts)
    kinds = {"f": "float", "u": "uchar"}
    properties = [f"property {kinds[vertices.dtype[name].kind]} {name}" for name in VERTEX.names or ()]
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(vertices)}", *properties, "end_header"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(f"{line}\n" for line in header).encode() + vertices.tobytes())


def entries() -> Iterator[dict[str, Any]]:
    """Yield the entries actor by actor. `gpuyard render` finds a better order by itself."""
    for number, (actor, scene) in enumerate(itertools.product((*ACTORS, None), SCENES)):
        moments = [[], []] if actor is None else [[(5 * number + 2) % FRAMES], [0, 3, 7, 11]]
        labels = [
            {"name": f"{scene}-{actor or 'empty'}-{shot}", "frames": frames, "camera": camera(2 * number + shot)}
            for shot, frames in enumerate(moments, 1)
        ]
        yield {"scene": f"scenes/{scene}.ply", "actor": actor and f"actors/{actor}", "labels": labels}


def main(folder: Path) -> None:
    for name, scene in SCENES.items():
        write_ply(folder / f"scenes/{name}.ply", scene())
    for name, actor in ACTORS.items():
        for frame in range(FRAMES):
            write_ply(folder / f"actors/{name}/frame-{frame}.ply", actor(frame / (FRAMES - 1)))
    (folder / "manifest.json").write_text(json.dumps(list(entries()), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "set"))
