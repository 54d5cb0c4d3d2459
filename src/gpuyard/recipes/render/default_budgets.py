"""Default VRAM and RAM budgets of a run: a part of the memory that is free now."""

import msgspec

from gpuyard import Snapshot, snapshot
from gpuyard.core.device_names import choose_vendor
from gpuyard.core.lease import Need
from gpuyard.core.units import format_size
from gpuyard.errors import EnvironmentFault
from gpuyard.residency.memory.open_memory import is_simulated, torch_with_gpu
from gpuyard.visible_devices import visible_devices

_OF_DEVICE, _OF_RAM = 0.8, 0.5
_OF_RAM_AS_VRAM = 0.25  # a simulated device uses host memory


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """`why` explains a default; None if the user gave the budget."""

    mb: float
    why: str | None = None

    def text(self) -> str:
        return format_size(self.mb) + ("" if self.why is None else f" ({self.why})")


def choose_vram(device: str) -> Budget:
    machine = snapshot()
    _, devices = choose_vendor(Need(), visible_devices(machine), machine)
    free = [mb for each in devices if (mb := each.memory_free_mb) is not None]
    has_device = is_simulated() or torch_with_gpu(device) is not None
    if not free or not has_device:
        available = _available_ram_mb(machine, "--vram-budget")
        return Budget(mb=available * _OF_RAM_AS_VRAM, why="a quarter of the available RAM")
    return Budget(mb=max(free) * _OF_DEVICE, why="80% of the free memory of the device with the most")


def choose_ram() -> Budget:
    return Budget(mb=_available_ram_mb(snapshot(), "--ram-budget") * _OF_RAM, why="half of the available RAM")


def _available_ram_mb(machine: Snapshot, option: str) -> float:
    if machine.host.memory_available_mb is None:
        raise EnvironmentFault("no probe can read the available RAM", hint=f"set the budget with {option}, such as 8G")
    return machine.host.memory_available_mb
