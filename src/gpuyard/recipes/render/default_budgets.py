"""How much VRAM and RAM a run may take where nobody said so: a part of what is free at this moment."""

import msgspec

from gpuyard.config import simulated_devices
from gpuyard.core.snapshot import Snapshot
from gpuyard.core.units import format_size
from gpuyard.errors import EnvironmentFault
from gpuyard.probes.local_machine import snapshot
from gpuyard.residency.memory.open_memory import torch_with_a_card
from gpuyard.visible_devices import visible_devices

_OF_DEVICE, _OF_RAM = 0.8, 0.5
_OF_RAM_AS_VRAM = 0.25  # a device that is simulated takes its memory from the host


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """`why` says where it comes from; `None` where the user said it."""

    mb: float
    why: str | None = None

    def text(self) -> str:
        return format_size(self.mb) + ("" if self.why is None else f" ({self.why})")


def choose_vram(device: str) -> Budget:
    seen = snapshot()
    free = _most_free_mb(seen)
    is_a_device = bool(simulated_devices()) or torch_with_a_card(device) is not None
    if free is None or not is_a_device:
        return Budget(mb=_available_mb(seen, "--vram-budget") * _OF_RAM_AS_VRAM, why="a quarter of the available RAM")
    return Budget(mb=free * _OF_DEVICE, why="80% of what is free on the emptiest device")


def choose_ram() -> Budget:
    return Budget(mb=_available_mb(snapshot(), "--ram-budget") * _OF_RAM, why="half of the available RAM")


def _most_free_mb(seen: Snapshot) -> float | None:
    free = [device.memory_free_mb for device in visible_devices(seen)]
    return max((mb for mb in free if mb is not None), default=None)


def _available_mb(seen: Snapshot, option: str) -> float:
    if seen.host.memory_available_mb is None:
        raise EnvironmentFault("no probe tells how much RAM is available", hint=f"say it with {option}, such as 8G")
    return seen.host.memory_available_mb
