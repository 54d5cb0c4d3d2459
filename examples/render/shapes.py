"""Surfaces made of coloured points with normals, and paints for them.

The discs of neighbouring points touch, so that a surface has no holes.
"""

import colorsys
from collections.abc import Callable
from math import cos, pi, sin
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Cloud = npt.NDArray[np.void]
Paint = Callable[[Floats], Any]  # returns a colour for each point, or one colour for all

STEP = 0.05  # distance between two points
VERTEX = np.dtype(
    [(name, "<f4") for name in ("x", "y", "z", "nx", "ny", "nz", "radius")]
    + [(name, "u1") for name in ("red", "green", "blue")]
)


def cloud(points: Floats, normals: Floats, paint: Paint, step: float) -> Cloud:
    made = np.zeros(len(points), VERTEX)
    colours = np.broadcast_to(paint(points), points.shape).clip(0, 1)
    for column, (axis, colour) in enumerate(zip("xyz", ("red", "green", "blue"), strict=True)):
        made[axis], made[f"n{axis}"] = points[:, column], normals[:, column]
        made[colour] = np.round(colours[:, column] * 255)
    made["radius"] = 0.8 * step
    return made


def grid(width: float, height: float, step: float) -> tuple[Floats, Floats]:
    """Return the coordinates of a grid of points, from 0 to 1 in both directions."""
    sides = [(np.arange(count) + 0.5) / count for count in (max(3, round(side / step)) for side in (width, height))]
    u, v = np.meshgrid(*sides)
    return u.ravel(), v.ravel()


def rectangle(corner: Any, along: Any, up: Any, paint: Paint, step: float = STEP) -> Cloud:
    """Return a rectangle that faces in the direction of `along` x `up`."""
    u, v = grid(float(np.linalg.norm(along)), float(np.linalg.norm(up)), step)
    points = np.asarray(corner) + np.outer(u, along) + np.outer(v, up)
    normal = np.cross(along, up) / np.linalg.norm(np.cross(along, up))
    return cloud(points, np.broadcast_to(normal, points.shape), paint, step)


def box(middle: Any, size: Any, paint: Paint, step: float = STEP) -> Cloud:
    """Return a box without its bottom."""
    low, (x, y, z) = np.asarray(middle) - np.asarray(size) / 2, np.diag(size)
    faces = [(low, x, z), (low + x, y, z), (low + x + y, -x, z), (low + y, -y, z), (low + z, x, y)]
    return np.concatenate([rectangle(*face, paint, step) for face in faces])


def ball(middle: Any, radius: float, paint: Paint, step: float = STEP, squash: float = 1.0) -> Cloud:
    count = max(40, round(4 * pi * radius**2 / step**2))
    height = 1 - 2 * (np.arange(count) + 0.5) / count
    turn = pi * (3 - 5**0.5) * np.arange(count)
    ring = np.sqrt(1 - height**2)
    normals = np.stack([ring * np.cos(turn), ring * np.sin(turn), height], 1)
    return cloud(np.asarray(middle) + normals * (radius, radius, radius * squash), normals, paint, step)


def tube(curve: Callable[[Floats], Any], length: float, radius: float, paint: Paint, step: float = STEP) -> Cloud:
    """Return a tube around a curve, a function of positions from 0 to 1."""
    u, v = grid(length, 2 * pi * radius, step)
    middle, ahead = (np.stack(curve(at), 1) for at in (u, u + 1e-4))
    tangent = (ahead - middle) / np.linalg.norm(ahead - middle, axis=1)[:, None]
    aside = np.cross(tangent, (0.31, 0.17, 0.94))
    aside /= np.linalg.norm(aside, axis=1)[:, None]
    turn = 2 * pi * v[:, None]
    normals = aside * np.cos(turn) + np.cross(tangent, aside) * np.sin(turn)
    return cloud(middle + radius * normals, normals, paint, step)


def rod(start: Any, end: Any, radius: float, paint: Paint, step: float = STEP) -> Cloud:
    start, along = np.asarray(start, float), np.subtract(end, start)
    line = tube(lambda u: (start + np.outer(u, along)).T, float(np.linalg.norm(along)), radius, paint, step)
    return np.concatenate([line, *(ball(point, radius, paint, step) for point in (start, start + along))])


def ring(middle: Any, radius: float, thickness: float, paint: Paint, tilt: float = 0.0) -> Cloud:
    def curve(u: Floats) -> Any:
        x, y = radius * np.cos(2 * pi * u), radius * np.sin(2 * pi * u)
        return middle[0] + x, middle[1] + y * cos(tilt), middle[2] + y * sin(tilt)

    return tube(curve, 2 * pi * radius, thickness, paint)


def knot(middle: Any, size: float, thickness: float, turn: float = 0.0, step: float = STEP) -> Cloud:
    def curve(u: Floats) -> Any:
        a = 2 * pi * u
        x, y = np.sin(a) + 2 * np.sin(2 * a), np.cos(a) - 2 * np.cos(2 * a)
        aside = x * cos(turn) - np.sin(3 * a) * sin(turn)
        back = x * sin(turn) + np.sin(3 * a) * cos(turn)
        return middle[0] + size / 3 * aside, middle[1] + size / 3 * back, middle[2] + size / 3 * y

    def paint(points: Floats) -> Any:
        away = points - middle
        return hues(np.arctan2(away[:, 2], away[:, 0] * cos(turn) + away[:, 1] * sin(turn)) / (2 * pi))

    return tube(curve, 10 * size, thickness, paint, step)


def ground(height: Callable[[Floats, Floats], Floats], size: float, paint: Paint) -> Cloud:
    u, v = grid(size, size, STEP * 1.2)
    x, y = (u - 0.5) * size, (v - 0.5) * size
    slope_x, slope_y = height(x + 0.01, y) - height(x - 0.01, y), height(x, y + 0.01) - height(x, y - 0.01)
    normals = np.stack([-slope_x, -slope_y, np.full_like(x, 0.02)], 1)
    normals /= np.linalg.norm(normals, axis=1)[:, None]
    return cloud(np.stack([x, y, height(x, y)], 1), normals, paint, STEP * 1.3)


# Paints


def plain(colour: str) -> Paint:
    return lambda _: rgb(colour)


def hue(turn: float) -> Paint:
    return lambda _: hues(np.array([turn]))


def checks(one: str, other: str, size: float) -> Paint:
    return lambda at: choose((np.floor(at[:, 0] / size) + np.floor(at[:, 1] / size)) % 2 == 0, one, other)


def bands(one: str, other: str, width: float, axis: int = 2) -> Paint:
    return lambda at: choose(np.floor(at[:, axis] / width) % 2 == 0, one, other)


def choose(which: Any, one: str, other: str) -> Floats:
    return np.where(which[:, None], rgb(one), rgb(other))


def rgb(colour: str) -> Floats:
    return np.array([int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)])


def hues(turns: Floats) -> Floats:
    wheel = np.array([colorsys.hsv_to_rgb(number / 96, 0.72, 0.95) for number in range(96)])
    return np.take(wheel, np.floor(turns % 1 * 96).astype(int) % 96, axis=0)
