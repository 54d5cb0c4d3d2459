"""The benchmark's renderer with CUDA graphs: the kernels of a picture are recorded once per thread and scene.

A picture is then six launches instead of 92. The pictures are those of `residency_render`, byte by byte.
"""

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import residency_render

_COLUMNS = (("x", "y", "z"), ("f_dc_0", "f_dc_1", "f_dc_2"))
_RECORDING = threading.Lock()  # PyTorch's random generators know one recording at a time
_own = threading.local()


def render_label(scene: Any, frames: Sequence[Any], label: dict[str, Any], out_dir: Path) -> None:
    turn, views = int(label["turn"]), int(label["views"])
    pictures = [picture(scene, frames, turn + view, 2 * math.pi * view / views) for view in range(views)]
    np.save(out_dir / "views.npy", np.stack([residency_render._on_host(small) for small in pictures]))  # noqa: SLF001


def picture(scene: Any, frames: Sequence[Any], number: int, angle: float) -> Any:
    frame = frames[number % len(frames)]
    clouds = [cloud.columns(*names) for cloud in (scene, frame) for names in _COLUMNS]
    key = (*((cloud.data_ptr(), cloud.shape) for cloud in clouds[:2]), clouds[2].shape)
    if getattr(_own, "key", None) != key:
        if not hasattr(_own, "key"):
            residency_render._picture(scene, frames, number, angle)  # noqa: SLF001 - kernels cannot be loaded later
        _own.recorded, _own.key = _Recorded(*clouds), key
    return _own.recorded.draw(clouds[2], clouds[3], angle)


class _Recorded:
    """A graph that draws one scene with any frame of one size. `frame` and `facing` are copied in before each use."""

    def __init__(self, places: Any, colours: Any, frame_places: Any, frame_colours: Any) -> None:
        import torch

        self._torch = torch
        self._frame = (torch.empty_like(frame_places), torch.empty_like(frame_colours))
        self._facing = tuple(torch.zeros((), device=places.device) for _ in range(2))
        self._constants = {
            value: torch.full((), value, dtype=torch.int64, device=places.device)
            for value in (0, residency_render._FAR)  # noqa: SLF001
        }
        self._canvas = torch.empty(residency_render._SIDE**2, dtype=torch.int64, device=places.device)  # noqa: SLF001
        if not hasattr(_own, "pool"):
            _own.pool = torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        with _RECORDING:
            self._graph.capture_begin(pool=_own.pool, capture_error_mode="thread_local")
            try:
                self._small = self._queue(((places, colours), self._frame))
            finally:
                self._graph.capture_end()

    def _queue(self, clouds: Sequence[tuple[Any, Any]]) -> Any:
        torch, render = self._torch, residency_render
        self._canvas.fill_(render._FAR)  # noqa: SLF001

        def where(condition: Any, chosen: Any, constant: int) -> Any:
            return torch.where(condition, chosen, self._constants[constant])

        for places, colours in clouds:
            pixels, keys = render._projected(  # noqa: SLF001
                places,
                colours,
                self._facing,  # type: ignore[arg-type]
                where,
                lambda array: array.to(torch.int64),
            )
            self._canvas.scatter_reduce_(0, pixels, keys, "amin")
        side, step = render._SIDE, render._STEP  # noqa: SLF001
        small = self._canvas.reshape(side, side)[::step, ::step]
        return small % (1 << 24) * (small < render._FAR)  # noqa: SLF001

    def draw(self, frame_places: Any, frame_colours: Any, angle: float) -> Any:
        self._frame[0].copy_(frame_places)
        self._frame[1].copy_(frame_colours)
        self._facing[0].fill_(math.cos(angle))
        self._facing[1].fill_(math.sin(angle))
        self._graph.replay()
        return self._small.clone()
