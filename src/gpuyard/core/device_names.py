"""Find devices by the names that users type, and reject requests that no device can ever serve."""

from collections.abc import Sequence

from msgspec.structs import replace

from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.core.units import format_count, format_size
from gpuyard.errors import UserError


def check_possible(count: int, memory_mb: float | None, candidates: Sequence[Device]) -> None:
    """Raise UserError for a request that would wait for ever: too few devices, or too little memory on them."""
    if len(candidates) < count:
        raise UserError(
            f"{format_count(count, 'GPU')} needed, but only {len(candidates)} can be used",
            hint="`gpuyard devices` lists all GPUs; CUDA_VISIBLE_DEVICES or a ban may exclude some",
            code="impossible",
        )
    needed = memory_mb or 0.0
    sizes = [device.memory_total_mb for device in candidates]
    large = [size for size in sizes if size is None or size >= needed]
    if len(large) < count:
        largest = format_size(max(size for size in sizes if size is not None))
        found = f"{len(large)} of {count} GPUs have" if large else "no GPU has"
        raise UserError(
            f"{found} {format_size(needed)}; the largest has {largest}",
            hint="ask for less memory, or for other GPUs; `gpuyard devices` shows the memory of each",
            code="impossible",
        )


def find_devices(names: Sequence[int | str], snapshot: Snapshot) -> tuple[str, ...]:
    """Return the ids of devices that are given as indexes, ids, or prefixes of ids."""
    usable = snapshot.usable_devices()
    found = []
    for name in names:
        device = next((device for device in usable if matches_name(name, device)), None)
        if device is None:
            known = ", ".join(each.id if each.index is None else f"{each.index} ({each.id})" for each in usable)
            raise UserError(f"there is no GPU '{name}'", hint=f"there are: {known or 'none'}")
        found.append(device.id)
    return tuple(found)


def find_all_devices(names: Sequence[int | str], snapshot: Snapshot) -> tuple[str, ...]:
    """Return ids as `find_devices` does, also of unhealthy devices and of cards that are split into parts."""
    split = {device.parent for device in snapshot.devices}
    cards = [device for device in snapshot.devices if device.id in split]
    healthy = replace(snapshot, devices=tuple(replace(device, fault=None) for device in snapshot.devices))
    found = []
    for name in names:
        card = next((card for card in cards if matches_name(name, card)), None)
        found.append(find_devices([name], healthy)[0] if card is None else card.id)
    return tuple(dict.fromkeys(found))


def matches_name(name: int | str, device: Device) -> bool:
    """Return whether `name` is the device's index, its id, or a prefix of its id with more than four characters."""
    text = str(name)
    return text in (str(device.index), device.id) or (len(text) > 4 and device.id.startswith(text))


def banned_ids(names: Sequence[int | str], models: Sequence[str], snapshot: Snapshot) -> tuple[str, ...]:
    """Return the ids of devices that are banned by index or id, or by a part of their model's name."""
    return tuple(
        device.id
        for device in snapshot.devices
        if any(matches_name(name, device) for name in names)
        or any(model and str(model) in (device.name or "") for model in models)
    )
