"""A small renderer: draws points with colours and normals as lit discs that cast shadows, and writes a PNG.

The same code works with two libraries: numpy for numpy arrays, and torch for tensors, on the device of the tensors.

The same label gives the same bytes each time: the nearest point of a pixel is a minimum of integers, which does not
depend on the order of the points, and all other operations are element by element.
"""

import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from math import radians, tan
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

Array = Any  # a numpy array or a torch tensor
Vector = Sequence[Any]  # three numbers, or three arrays

WIDTH, HEIGHT, SAMPLES = 256, 192, 2  # a pixel is the mean of SAMPLES x SAMPLES samples
TO_LIGHT = (0.46, -0.55, 0.70)
SUN, SKY, GROUND = (1.02, 0.94, 0.80), (0.34, 0.42, 0.54), (0.22, 0.19, 0.17)
HORIZON, ZENITH = (0.83, 0.88, 0.92), (0.42, 0.58, 0.78)
SHADOW_CELL, SHADOW_CELLS = 0.05, 560
MAX_RADIUS = 8  # of a disc, in pixels
NEAR, FAR = 0.1, 1e9
INDEX_BITS, DEPTH_STEPS, NOTHING = 24, 1 << 12, 1 << 62


class Points(NamedTuple):
    at: Vector
    normal: Vector
    radius: Array
    colour: Vector


class Discs(NamedTuple):
    """Points as a camera or the sun sees them: positions in pixels, and depths."""

    u: Array
    v: Array
    reach: Array  # the radius in pixels
    depth: Array
    radius: Array


def render_label(scene: Mapping[str, Array], frames: Sequence[Mapping[str, Array]], label: Any, out_dir: Path) -> None:
    """Render one label: a `camera` (`eye`, `target`, and `fov` in degrees) and the numbers of the `frames` to show."""
    # Read each frame completely before the next: streamed frames replace each other.
    clouds = [_columns(cloud) for cloud in (scene, *(frames[number] for number in label["frames"]))]
    xp = sys.modules[type(clouds[0][0]).__module__.partition(".")[0]]
    x, y, z, nx, ny, nz, radius, *colour = (xp.concatenate(parts) for parts in zip(*clouds, strict=True))
    points = Points((x, y, z), (nx, ny, nz), radius, colour)
    picture = _draw(xp, points, _light(xp, points), label["camera"])
    _write_png(out_dir / "image.png", picture if xp is np else picture.cpu().numpy())


def _columns(cloud: Mapping[str, Array]) -> list[Array]:
    return [cloud[name] for name in ("x", "y", "z", "nx", "ny", "nz", "radius", "red", "green", "blue")]


def _light(xp: ModuleType, points: Points) -> Vector:
    """Return the light that each point reflects: sunlight where no shadow falls, plus ambient light."""
    facing = _dot(points.normal, TO_LIGHT).clip(0)
    sun, up = facing * _sun_visibility(xp, points, facing), 0.5 + 0.5 * points.normal[2]
    light = [SUN[i] * sun + SKY[i] * up + GROUND[i] * (1 - up) for i in range(3)]
    return [(_to_float(xp, points.colour[i]) / 255) ** 2 * light[i] for i in range(3)]


def _sun_visibility(xp: ModuleType, points: Points, facing: Array) -> Array:
    """Return the part of the sun that each point sees, from 0 to 1: the mean of nine cells of the shadow map."""
    right, up = _axes(TO_LIGHT)
    u, v = (_dot(points.at, axis) / SHADOW_CELL + SHADOW_CELLS / 2 for axis in (right, up))
    depth = 64 - _dot(points.at, TO_LIGHT)
    discs = Discs(u, v, points.radius / SHADOW_CELL, depth, points.radius)
    nearest, _ = _nearest(xp, discs, SHADOW_CELLS, SHADOW_CELLS)
    # A difference this small is the surface itself; the tolerance grows with the slope.
    own = 0.1 + 0.25 * (1 - facing)
    lit = 0 * depth
    for du, dv in ((du, dv) for du in (-1, 0, 1) for dv in (-1, 0, 1)):
        column, row = (_to_int(xp, at).clip(0, SHADOW_CELLS - 1) for at in (u + du, v + dv))
        lit = lit + _to_float(xp, depth - nearest[row, column] < own) / 9
    return lit


def _draw(xp: ModuleType, points: Points, lit: Vector, camera: Mapping[str, Any]) -> Array:
    """Return the picture as height x width x 3 bytes."""
    discs, chosen = _project(points, camera)
    distance, number = _nearest(xp, discs, WIDTH * SAMPLES, HEIGHT * SAMPLES)
    edges, haze = _edge_shading(xp, distance), 1 - xp.exp(-((distance / 60) ** 2))
    channels = []
    for sky, light in zip(_sky(xp, distance), lit, strict=True):
        colour = light[chosen][number] * edges
        channels.append(xp.where(distance < FAR, colour + (sky - colour) * haze, sky))
    fine = xp.stack(channels, -1).reshape(HEIGHT, SAMPLES, WIDTH, SAMPLES, 3)
    mean = sum(fine[:, i, :, j] for i in range(SAMPLES) for j in range(SAMPLES)) / SAMPLES**2
    return xp.asarray(xp.sqrt(mean.clip(0, 1)) * 255 + 0.5, dtype=xp.uint8)


def _project(points: Points, camera: Mapping[str, Any]) -> tuple[Discs, Array]:
    """Return the discs in front of the camera that face it, and the mask that selects their points."""
    width, height = WIDTH * SAMPLES, HEIGHT * SAMPLES
    back = _unit([eye - target for eye, target in zip(camera["eye"], camera["target"], strict=True)])
    right, up = _axes(back)
    away = [at - eye for at, eye in zip(points.at, camera["eye"], strict=True)]
    chosen = (-_dot(away, back) > NEAR) & (_dot(away, points.normal) < 0)
    away, radius = [part[chosen] for part in away], points.radius[chosen]
    depth = -_dot(away, back)
    scale = height / 2 / tan(radians(camera["fov"]) / 2) / depth
    u, v = _dot(away, right) * scale + width / 2, height / 2 - _dot(away, up) * scale
    return Discs(u, v, radius * scale, depth, radius), chosen


def _nearest(xp: ModuleType, discs: Discs, width: int, height: int) -> tuple[Array, Array]:
    """Return for each pixel the distance of the nearest disc, and its number.

    Discs bulge towards the eye: where two overlap, a pixel belongs to the disc whose centre is nearer.
    """
    discs, order = _largest_first(xp, discs, width, height)
    column, row = xp.floor(discs.u), xp.floor(discs.v)
    # The buffer has a margin of twice the largest radius, so discs never reach outside it.
    across, down = width + 4 * MAX_RADIUS, height + 4 * MAX_RADIUS
    pixel = _to_int(xp, row + 2 * MAX_RADIUS) * across + _to_int(xp, column + 2 * MAX_RADIUS)
    to_u, to_v = column + 0.5 - discs.u, row + 0.5 - discs.v
    buffer = _to_device(xp, np.full(down * across, NOTHING), order)
    reach = int(discs.reach[0]) + 1 if len(order) else 0
    for du, dv in ((du, dv) for du in range(-reach, reach + 1) for dv in range(-reach, reach + 1)):
        first = slice(0, int((discs.reach > (du * du + dv * dv) ** 0.5 - 0.75).sum()))
        away = ((to_u[first] + du) ** 2 + (to_v[first] + dv) ** 2) / discs.reach[first] ** 2
        covers = away <= 1
        depth = (discs.depth[first] + away * discs.radius[first])[covers]
        keys = (_to_int(xp, depth * DEPTH_STEPS) << INDEX_BITS) | order[first][covers]
        _scatter_min(xp, buffer, pixel[first][covers] + (dv * across + du), keys)
    found = buffer.reshape(down, across)[2 * MAX_RADIUS : -2 * MAX_RADIUS, 2 * MAX_RADIUS : -2 * MAX_RADIUS]
    distance = xp.where(found == NOTHING, FAR, _to_float(xp, found >> INDEX_BITS) / DEPTH_STEPS)
    return distance, xp.where(found == NOTHING, 0, found & ((1 << INDEX_BITS) - 1))


def _largest_first(xp: ModuleType, discs: Discs, width: int, height: int) -> tuple[Discs, Array]:
    """Return the discs in the picture or at its edge, each at least a pixel large, and their numbers."""
    discs = discs._replace(reach=discs.reach.clip(0.75, MAX_RADIUS - 1))
    is_near_u = (discs.u > -MAX_RADIUS) & (discs.u < width + MAX_RADIUS)
    is_near = is_near_u & (discs.v > -MAX_RADIUS) & (discs.v < height + MAX_RADIUS)
    order = xp.argsort(-discs.reach)
    order = order[is_near[order]]
    return Discs(*(part[order] for part in discs)), order


def _edge_shading(xp: ModuleType, distance: Array) -> Array:
    """Return a factor that darkens pixels beside nearer ones, so that shapes of one colour stand out."""
    log = xp.log(distance)
    behind = 0 * log
    for dv, du in ((0, 2), (0, -2), (2, 0), (-2, 0), (3, 3), (3, -3), (-3, 3), (-3, -3)):
        behind = behind + (log - _shift(xp, log, dv, du)).clip(0, 0.12)
    return xp.exp(-0.9 * behind)


def _shift(xp: ModuleType, picture: Array, dv: int, du: int) -> Array:
    """Shift the picture by (dv, du) pixels; pixels at the edge are repeated."""
    height, width = picture.shape
    rows, columns = (np.arange(height) + dv).clip(0, height - 1), (np.arange(width) + du).clip(0, width - 1)
    return picture[_to_device(xp, rows, picture)][:, _to_device(xp, columns, picture)]


def _sky(xp: ModuleType, like: Array) -> Vector:
    height = 0 * like + _to_device(xp, np.linspace(1, 0, like.shape[0], dtype=np.float32)[:, None], like)
    return [(HORIZON[i] + (ZENITH[i] - HORIZON[i]) * height) ** 2 for i in range(3)]


# Differences between numpy and torch


def _scatter_min(xp: ModuleType, buffer: Array, places: Array, keys: Array) -> None:
    if xp is np:
        np.minimum.at(buffer, places, keys)
    else:
        buffer.scatter_reduce_(0, places, keys, "amin")


def _to_device(xp: ModuleType, numbers: Any, like: Array) -> Array:
    """Return a numpy array on the device of `like`."""
    return numbers if xp is np else xp.as_tensor(numbers, device=like.device)


def _to_int(xp: ModuleType, numbers: Array) -> Array:
    return xp.asarray(xp.floor(numbers), dtype=xp.int64)


def _to_float(xp: ModuleType, numbers: Array) -> Array:
    return xp.asarray(numbers, dtype=xp.float32)


# Vectors and files


def _dot(a: Vector, b: Vector) -> Any:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _unit(vector: Vector) -> Vector:
    length = _dot(vector, vector) ** 0.5
    return [part / length for part in vector]


def _axes(back: Vector) -> tuple[Vector, Vector]:
    """Return the directions right and up of a viewer who looks along -`back`."""
    x, y, z = _unit(back)
    right = _unit((-y, x, 0.0))
    return right, (-z * right[1], z * right[0], x * right[1] - y * right[0])


def _write_png(path: Path, pixels: Any) -> None:
    height, width, _ = pixels.shape
    rows = np.full((height, 1 + 3 * width), 2, np.uint8)  # 2: the PNG filter Up (differences to the row above)
    rows[:, 1:] = pixels.reshape(height, -1)
    rows[1:, 1:] -= rows[:-1, 1:].copy()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    with path.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 4)), (b"IEND", b"")):
            file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
