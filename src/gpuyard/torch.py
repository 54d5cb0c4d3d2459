"""`gpuyard.torch.parkable(model, optimizer)`: a PyTorch program that moves its GPU memory to RAM itself when its job is
suspended, in about a second for 35 GB instead of many.

PyTorch is imported only when a program calls `parkable`. Outside a job nothing happens.
"""

import atexit
import os
import sys
from typing import Any

from gpuyard.errors import GpuyardError
from gpuyard.scripting.park_listener import ParkListener
from gpuyard.scripting.park_tensors import TensorParking
from gpuyard.system.park_sockets import own_path

__all__ = ["Parking", "parkable"]


class Parking:
    """The tensors that `parkable` was called with."""

    def __init__(self, things: tuple[Any, ...], path: str | None) -> None:
        self._tensors = TensorParking(things)
        self._path = path
        self._listener: ParkListener | None = None
        self._hooks = [each.register_step_post_hook(self._after_step) for each in things if _is_optimizer(each)]

    def point(self) -> None:
        """Tell that a step is over: nothing uses the tensors until the next one. If the job is being suspended, park,
        and return when it is resumed. The first call allocates the host memory."""
        if self._listener is not None:
            self._listener.point()
        elif self._path is not None:
            self._register(self._path)

    def _after_step(self, *_: object) -> None:
        self.point()

    def _register(self, path: str) -> None:
        self._path = None  # once
        try:
            self._tensors.reserve()
            self._listener = ParkListener(path, self._tensors.park, self._tensors.bring_back)
        except (OSError, GpuyardError, RuntimeError) as error:  # no training ends for this: the driver can suspend it
            sys.stderr.write(f"gpuyard: this program cannot park its GPU memory: {error}\n")
            return
        atexit.register(self._listener.close)


def parkable(*things: Any) -> Parking:
    """Let gpuyard move the GPU memory of these to RAM when the job is suspended, and back when it is resumed.

    things: modules, optimisers and tensors, and lists, tuples and dicts of them. With an optimiser, `point` is called
    after each of its steps; without one, call it yourself between two steps: `parking.point()`.

    At the first `point` it allocates as much RAM as the tensors and their gradients hold on GPUs, and keeps it until
    the program ends. Tensors that are not among `things` are moved by the driver, more slowly.
    """
    return Parking(things, own_path(os.environ))


def _is_optimizer(thing: Any) -> bool:
    return hasattr(thing, "register_step_post_hook")
