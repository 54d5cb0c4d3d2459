"""Devices by the names that people give them, and what can never be had of them."""

from collections.abc import Sequence

from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.core.units import format_size
from gpuyard.errors import UserError


def check_possible(count: int, memory_mb: float | None, candidates: Sequence[Device]) -> None:
    """What can never be had is not waited for."""
    if len(candidates) < count:
        plural = "" if count == 1 else "s"
        raise UserError(
            f"{count} GPU{plural} asked for, and there are {len(candidates)} to choose from",
            hint="`gpuyard devices` shows all; CUDA_VISIBLE_DEVICES or a ban may leave some out",
        )
    needed = memory_mb or 0.0
    large = [device for device in candidates if device.memory_total_mb is None or device.memory_total_mb >= needed]
    if len(large) < count:
        raise UserError(
            f"{format_size(needed)} is more than the GPUs have ({len(large)} of {count} are large enough)",
            hint="`gpuyard devices` shows how much they have",
        )


def find_devices(names: Sequence[int | str], seen: Snapshot) -> tuple[str, ...]:
    """The ids of devices given as indexes, ids, or beginnings of ids."""
    return tuple(_find(name, seen).id for name in names)


def _find(name: int | str, seen: Snapshot) -> Device:
    for device in seen.usable_devices():
        if is_called(name, device):
            return device
    known = ", ".join(_both_names(device) for device in seen.usable_devices()) or "none"
    raise UserError(f"there is no GPU '{name}'", hint=f"there are: {known}")


def _both_names(device: Device) -> str:
    return device.id if device.index is None else f"{device.index} ({device.id})"


def is_called(name: int | str, device: Device) -> bool:
    """By its index, its id, or enough of the beginning of its id to mean something."""
    text = str(name)
    return text in (str(device.index), device.id) or (len(text) > 4 and device.id.startswith(text))


def ban(names: Sequence[int | str], models: Sequence[str], seen: Snapshot) -> tuple[str, ...]:
    """The ids of those that are banned by index or id, or by a part of their model's name."""
    return tuple(
        device.id
        for device in seen.devices
        if any(is_called(name, device) for name in names)
        or any(model and str(model) in (device.name or "") for model in models)
    )
