"""A small renderer of z-buffered coloured points, with scene and actor in one picture, in PyTorch or numpy.

A pixel is the smallest key of its points: the depth in the high bits, the colour in the low bits. So a picture does not
depend on the order in which points are drawn, and the outputs of two passes can be compared byte by byte.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_SIDE, _STEP = 512, 8  # side of a picture in pixels; every 8th pixel is saved
_FAR = 1 << 62


def render_label(scene: Any, frames: Sequence[Any], label: dict[str, Any], out_dir: Path) -> None:
    """Render several frames of the actor, each from a different angle."""
    turn, views = int(label["turn"]), int(label["views"])
    pictures = [_picture(scene, frames, turn + view, 2 * math.pi * view / views) for view in range(views)]
    np.save(out_dir / "views.npy", np.stack([_on_host(picture) for picture in pictures]))


def _picture(scene: Any, frames: Sequence[Any], frame: int, angle: float) -> Any:
    canvas = None
    for cloud in (scene, frames[frame % len(frames)]):
        places, colours = cloud.columns("x", "y", "z"), cloud.columns("f_dc_0", "f_dc_1", "f_dc_2")
        draw = _draw_numpy if isinstance(places, np.ndarray) else _draw_torch
        canvas = draw(canvas, places, colours, (math.cos(angle), math.sin(angle)))
    assert canvas is not None
    small = canvas.reshape(_SIDE, _SIDE)[::_STEP, ::_STEP]
    return small % (1 << 24) * (small < _FAR)


def _draw_torch(canvas: Any, places: Any, colours: Any, facing: tuple[float, float]) -> Any:
    import torch

    if canvas is None:
        canvas = torch.full((_SIDE * _SIDE,), _FAR, dtype=torch.int64, device=places.device)
    pixels, keys = _projected(places, colours, facing, torch.where, lambda array: array.to(torch.int64))
    return canvas.scatter_reduce_(0, pixels, keys, "amin")


def _draw_numpy(canvas: Any, places: Any, colours: Any, facing: tuple[float, float]) -> Any:
    if canvas is None:
        canvas = np.full(_SIDE * _SIDE, _FAR, np.int64)
    pixels, keys = _projected(places, colours, facing, np.where, lambda array: array.astype(np.int64))
    np.minimum.at(canvas, pixels, keys)
    return canvas


def _projected(places: Any, colours: Any, facing: tuple[float, float], where: Any, whole: Any) -> tuple[Any, Any]:
    """Return the pixel and the key of each point; points outside of the picture get the key _FAR."""
    cos, sin = facing
    x, y, z = (places[:, axis] for axis in range(3))
    depth = z * cos - x * sin + 3.0
    across = whole(((x * cos + z * sin) / depth + 0.5) * _SIDE)
    down = whole((y / depth + 0.5) * _SIDE)
    is_inside = (across >= 0) & (across < _SIDE) & (down >= 0) & (down < _SIDE)
    keys = whole(depth * 65536.0) * (1 << 24)
    for channel in range(3):
        keys += whole(colours[:, channel] * 255.0) * (1 << 8 * channel)
    return where(is_inside, down * _SIDE + across, 0), where(is_inside, keys, _FAR)


def _on_host(picture: Any) -> Any:
    whole = picture if isinstance(picture, np.ndarray) else picture.cpu().numpy()
    return np.ascontiguousarray(whole).view(np.uint8).reshape(*whole.shape, 8)[..., :3]
