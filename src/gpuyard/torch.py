"""`gpuyard.torch.parkable(model, optimizer)`: a PyTorch program that moves its GPU memory to RAM itself when its job is
suspended, in about a second for 35 GB instead of many.

PyTorch is imported only when a program calls `parkable`. Outside a job nothing happens.
"""

import atexit
import importlib
import os
import sys
from typing import Any

from gpuyard.errors import GpuyardError, UserError
from gpuyard.scripting.park_tensors import ParkListener, TensorParking
from gpuyard.system.parking_protocol import own_attempt, path_of

__all__ = ["Parking", "parkable"]


class Parking:
    """The tensors that `parkable` was called with."""

    def __init__(self, things: tuple[Any, ...], world_size: int | None) -> None:
        self._tensors = TensorParking(things)
        self._world_size = world_size
        self._attempt = own_attempt(os.environ)
        self._listener: ParkListener | None = None
        optimizers = [each for each in things if hasattr(each, "register_step_post_hook")]
        self._hooks = [each.register_step_post_hook(lambda *_: self.point()) for each in optimizers]

    @property
    def is_parked(self) -> bool:
        """Whether the tensors are empty now. A signal handler that saves them itself, instead of raising an exception
        or noting the signal, must not do so then."""
        return self._tensors.is_parked

    def point(self) -> None:
        """Tell that a step is over: nothing uses the tensors until the next one. If the job is being suspended, park,
        and return when it is resumed. The first call allocates the host memory.

        If a signal handler raises an exception meanwhile, the tensors become tensors of the CPU, which can be saved."""
        if self._listener is not None:
            self._listener.point()
        elif self._attempt is not None:
            self._register(*self._attempt)

    def _stay_in_ram(self) -> bool:
        empty = self._tensors.stay_in_ram()
        if empty is None:
            return False
        sys.stderr.write(
            "gpuyard: a signal ended this program while its GPU memory was parked. Its tensors are on the CPU now and"
            " can be saved; calls of CUDA may wait for ever.\n"
        )
        if empty:
            sys.stderr.write(f"gpuyard: {empty} of its tensors are empty. Do not save them.\n")
        return True

    def _register(self, queue: str, attempt: str) -> None:
        self._attempt = None  # once
        path = path_of(queue, attempt, os.getpid(), self._world_size or _world_size())
        try:
            if not self._tensors.reserve():  # all of them are in RAM, or on a GPU that is not PyTorch's "cuda"
                return
            self._listener = ParkListener(path, self._tensors.park, self._tensors.bring_back, self._stay_in_ram)
        except (OSError, GpuyardError, RuntimeError) as error:  # no training ends for this: the driver can suspend it
            sys.stderr.write(f"gpuyard: this program cannot park its GPU memory: {error}\n")
            return
        atexit.register(self._listener.close)


def parkable(*things: Any, world_size: int | None = None) -> Parking:
    """Let gpuyard move the GPU memory of these to RAM when the job is suspended, and back when it is resumed.

    things: modules, optimisers and tensors, and lists, tuples and dicts of them. With an optimiser, `point` is called
    after each of its steps; without one, call it yourself between two steps: `parking.point()`.
    world_size: how many processes of the job wait for each other within a step, this one among them. All of them have
    to call `parkable`, and then `point` after the same steps; they park together. Default: the world size of
    torch.distributed at the first `point`, or 1 without it.

    At the first `point` it allocates as much RAM as the tensors and their gradients hold on GPUs, and keeps it until
    the program ends. Tensors that are not among `things` are moved by the driver, more slowly.
    """
    if world_size is not None and world_size < 1:
        raise UserError(f"world_size is {world_size}", hint="give the number of processes that work together")
    return Parking(things, world_size)


def _world_size() -> int:
    distributed: Any = importlib.import_module("torch.distributed")
    return int(distributed.get_world_size()) if distributed.is_available() and distributed.is_initialized() else 1
