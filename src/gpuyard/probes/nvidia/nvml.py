"""NVIDIA devices through NVML, the driver's own library: the cheapest and most complete probe.

- A figure that the driver does not report is unknown; only the errors for a lost card make it unhealthy. A card that
  supports no figures at all (a Jetson) is healthy; a card where all figures fail for another reason is not.
- A card that this user may not use is not listed: a problem says how many there are. The others keep their numbers.
- On an H200 it takes 160 us to ask whether a card is split into MIG instances, more than all figures together, and 2 ms
  for the load per process: the first is asked every 10 s, the second only for a busy card.
- The library is initialised once, and again after a fork, after it reports that it was closed, and from time to time
  while a card is unhealthy, because only a new initialisation sees a card that came back."""

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import ProbeCrashed, ProbeDenied, ProbeError, ProbeMissing
from gpuyard.model.machine_snapshot import Device, Problem, Process, Reading, Vendor
from gpuyard.policy.numbers import IDLE_PERCENT
from gpuyard.probes.devices_and_processes import one_per_pid, pci_bus_id
from gpuyard.probes.nvidia.nvml_health_and_energy import (
    ASK_RARELY_S,
    EnergyCounters,
    KernelCard,
    NvmlHealth,
    list_kernel_cards,
    window_start,
    with_loads,
)
from gpuyard.probes.parse_numbers import megabytes
from gpuyard.probes.run_tool import as_problem

SETUP_AGAIN_AFTER_S = 30.0
_HINT_MISSING = "it comes with NVIDIA's driver"
_HINT_DENIED = (
    "look at the permissions of /dev/nvidia*, and at the device limits of your cgroup (a job's, a container's)"
)


class _NvmlCard(Struct, frozen=True, kw_only=True):
    """`device` has the identity of the card, and its fault. A card with a fault, or a denied one, has no handle."""

    device: Device
    handle: Any = None
    is_split: bool = False
    is_denied: bool = False


class _LostError(Exception):
    """The driver reports the card as lost; the argument is its message."""


class Nvml:
    name = "nvml"
    vendor = Vendor.NVIDIA
    may_hang = True

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._driver: _Driver | None = None
        self._pid = 0
        self._cards: tuple[_NvmlCard, ...] = ()
        self._problems: tuple[Problem, ...] = ()
        self._set_up_at = 0.0
        self._mig_asked_at = 0.0
        self._health = NvmlHealth(root)

    def read(self, timeout_s: float) -> Reading:  # noqa: ARG002 - a driver call cannot be interrupted
        driver = self._driver = self._driver or _Driver(import_nvml())
        try:
            is_ill = any(card.device.fault for card in self._cards)
            if (
                self._pid != os.getpid()
                or driver.nvml.nvmlDeviceGetCount() != len(self._cards)
                or (is_ill and time.monotonic() - self._set_up_at > SETUP_AGAIN_AFTER_S)
            ):
                self._set_up(driver)
            if time.monotonic() - self._mig_asked_at > ASK_RARELY_S:
                self._cards = tuple(replace(card, is_split=driver.is_split(card)) for card in self._cards)
                self._mig_asked_at = time.monotonic()
            measured = [_measure(driver, card) for card in self._cards]
            self._health.collect_events(driver, [(card.device, card.handle) for card in self._cards])
            devices = tuple(chain.from_iterable(self._with_health(driver, *each) for each in measured))
        except driver.nvml.NVMLError as error:
            self._close(driver.nvml)
            raise _as_probe_error(driver.nvml, error) from error
        self._cards = tuple(card for card, _ in measured)
        return Reading(devices=devices, problems=self._problems)

    def _with_health(self, driver: "_Driver", card: _NvmlCard, devices: list[Device]) -> list[Device]:
        health = self._health.lost(card.device.id)
        if card.handle is not None:
            with contextlib.suppress(_LostError):
                health = self._health.read(driver, card.handle, devices[0])
        return [replace(each, health=health) if each.id == card.device.id else each for each in devices]

    def read_memory(self, devices: Sequence[Device]) -> list[Device]:
        """Read a few devices without setting up again what `read` takes care of."""
        driver = self._driver
        if driver is None or self._pid != os.getpid():
            return []
        ids, cards = {each.id for each in devices}, {each.parent or each.id for each in devices}
        found: list[Device] = []
        try:
            for card in self._cards:
                if card.device.id in cards and card.handle is not None:
                    with contextlib.suppress(_LostError):  # `read` reports it
                        if card.device.id in ids:
                            found.append(replace(card.device, **_memory_and_processes(driver, card.handle)))
                        found += [part for part in _measure_parts(driver, card) if part.id in ids]
        except driver.nvml.NVMLError as error:
            raise _as_probe_error(driver.nvml, error) from error
        return found

    def _set_up(self, driver: "_Driver") -> None:
        self._close(driver.nvml)
        driver.nvml.nvmlInit()
        self._pid, self._set_up_at, self._mig_asked_at = os.getpid(), time.monotonic(), float("-inf")
        found = [_identify(driver, index) for index in range(driver.nvml.nvmlDeviceGetCount())]
        self._cards = tuple(_named(found, self._cards, list_kernel_cards(self._root)))
        denied = sum(card.is_denied for card in self._cards)
        message = f"this user may not use {denied} of {len(self._cards)} GPUs"
        refusal = as_problem(ProbeDenied("nvml", message, hint=_HINT_DENIED), Vendor.NVIDIA)
        self._problems = (refusal,) if denied else ()

    def _close(self, nvml: ModuleType) -> None:
        """Shut the library down as often as it was initialised; otherwise it stays initialised."""
        is_ours = self._pid == os.getpid()  # not after a fork
        self._health.close(nvml if is_ours else None)
        if is_ours:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
        self._pid = 0


class _Driver:
    """NVML's functions by name. `failed` is True if a call failed, but not because the device does not support it."""

    def __init__(self, nvml: ModuleType) -> None:
        self.nvml = nvml
        self.failed = False
        self._sampled_from: dict[str, int] = {}
        self._energy_counters = EnergyCounters()
        self._gone = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
        self.has_none = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    def ask(self, function: str, *arguments: Any, not_found: Any = None) -> Any:
        """Return the driver's answer, `not_found` if it finds nothing, else None. Raise _LostError for a lost card."""
        call = getattr(self.nvml, function, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self.nvml.NVMLError as error:
            if error.value in self._gone:
                raise _LostError(str(error)) from error
            if error.value == self.nvml.NVML_ERROR_UNINITIALIZED:
                raise
            self.failed |= error.value not in self.has_none
            is_empty = not_found is not None and error.value == self.nvml.NVML_ERROR_NOT_FOUND
            return not_found if is_empty else None

    def is_split(self, card: _NvmlCard) -> bool:
        """Return whether the card is split into MIG instances. A lost card is detected when it is measured."""
        mode = None
        with contextlib.suppress(_LostError):
            mode = self.ask("nvmlDeviceGetMigMode", card.handle) if card.handle is not None else None
        return bool(mode and mode[0])

    def joules(self, card: _NvmlCard, power_w: float | None) -> float | None:
        ask = partial(self.ask, "nvmlDeviceGetTotalEnergyConsumption", card.handle)
        return self._energy_counters.read(card.device.id, power_w, time.monotonic(), lambda: _thousandth(ask()))

    def samples(self, card: _NvmlCard) -> list[Any] | None:
        """Return load samples of processes since shortly before the newest known one, or None if there are none."""
        since = self._sampled_from.get(card.device.id, 0)
        found = self.ask("nvmlDeviceGetProcessUtilization", card.handle, since, not_found=())
        if found is None:
            return None
        self._sampled_from[card.device.id] = max(since, window_start(samples := list(found)))
        return samples


def import_nvml() -> ModuleType:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # this check costs a hundredth of the failing import
    except OSError as error:
        raise ProbeMissing("nvml", "libnvidia-ml.so.1 is not installed", hint=_HINT_MISSING) from error
    try:
        import pynvml
    except ImportError as error:
        raise ProbeMissing("nvml", f"the Python package cannot be imported: {error}") from error
    return pynvml  # type: ignore[no-any-return]


def _as_probe_error(nvml: ModuleType, error: Any) -> ProbeError:
    message = f"NVML says: {error}"
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return ProbeMissing("nvml", "libnvidia-ml.so.1 cannot be loaded", hint=_HINT_MISSING)
    if error.value == nvml.NVML_ERROR_NO_PERMISSION:
        return ProbeDenied("nvml", message, hint=_HINT_DENIED)
    hints = {
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "load it with `modprobe nvidia`, or see dmesg for why it is not",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was updated while in use: reboot, or reload it",
    }
    return ProbeCrashed("nvml", message, hint=hints.get(error.value, "see dmesg for what the driver says"))


def _identify(driver: _Driver, index: int) -> _NvmlCard:
    """Return the constant facts of one card; for a card that does not answer, its number and fault."""
    nvml = driver.nvml
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        pci = driver.ask("nvmlDeviceGetPciInfo", handle)
        bus_id = pci_bus_id(_text(pci.busId)) if pci else None
        uuid = None  # some have none; any other answer marks the card as faulty
        try:
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError as error:
            if error.value not in driver.has_none:
                raise
        name, card_id = _text(driver.ask("nvmlDeviceGetName", handle)), uuid or bus_id or f"nvidia-{index}"
        device = Device(id=card_id, vendor=Vendor.NVIDIA, index=index, name=name, pci_bus_id=bus_id)
        return _NvmlCard(device=device, handle=handle)
    except (_LostError, nvml.NVMLError) as error:
        is_denied = getattr(error, "value", None) == nvml.NVML_ERROR_NO_PERMISSION
        fault = None if is_denied else str(error)
        device = Device(id=f"nvidia-{index}", vendor=Vendor.NVIDIA, index=index, fault=fault)
        return _NvmlCard(device=device, is_denied=is_denied)


def _named(
    found: list[_NvmlCard], known: tuple[_NvmlCard, ...], in_kernel: tuple[KernelCard, ...]
) -> Iterator[_NvmlCard]:
    """Return the cards, with a lost card identified by its previous facts, or by the kernel's list. If cards have left
    the list, numbers have shifted and identify nothing."""
    well = {card.device.id for card in found if card.device.fault is None}
    missed = [card.device for card in known if card.device.id not in well and not card.is_denied]
    before = {device.index: device for device in missed} if len(known) == len(found) else {}
    kernel: dict[int | None, KernelCard] = dict(enumerate(in_kernel)) if len(in_kernel) == len(found) else {}
    for card in found:
        device = card.device
        if device.fault is None:
            yield card
        elif device.index in before:
            yield _NvmlCard(device=replace(before[device.index], fault=device.fault))
        else:
            facts = kernel.get(device.index, KernelCard(pci_bus_id=None))
            card_id = facts.uuid or facts.pci_bus_id or device.id
            yield _NvmlCard(device=replace(device, id=card_id, name=facts.name, pci_bus_id=facts.pci_bus_id))


def _measure(driver: _Driver, card: _NvmlCard) -> tuple[_NvmlCard, list[Device]]:
    """Return the updated card, and the devices it consists of: itself and its parts."""
    if card.is_denied:
        return card, []
    try:
        if card.device.fault is None:
            return card, [_measure_card(driver, card), *_measure_parts(driver, card)]
    except _LostError as lost:
        card = _NvmlCard(device=replace(card.device, fault=str(lost)))
    return card, [card.device]


def _measure_card(driver: _Driver, card: _NvmlCard) -> Device:
    driver.failed = False
    utilization = driver.ask("nvmlDeviceGetUtilizationRates", card.handle)
    power_w = _thousandth(driver.ask("nvmlDeviceGetPowerUsage", card.handle))
    temperature = driver.ask("nvmlDeviceGetTemperatureV", card.handle, driver.nvml.NVML_TEMPERATURE_GPU)
    if temperature is None:  # older drivers have only the deprecated call
        temperature = driver.ask("nvmlDeviceGetTemperature", card.handle, driver.nvml.NVML_TEMPERATURE_GPU)
    device = replace(
        card.device,
        **_memory_and_processes(driver, card.handle),
        utilization_percent=None if utilization is None else float(utilization.gpu),
        power_draw_w=power_w,
        power_limit_w=_thousandth(driver.ask("nvmlDeviceGetEnforcedPowerLimit", card.handle)),
        energy_j=driver.joules(card, power_w),
        temperature_c=None if temperature is None else float(temperature),
    )
    if device.processes and not card.is_split and (device.utilization_percent or 0.0) > IDLE_PERCENT:
        samples = driver.samples(card)
        if samples is not None:
            device = replace(device, processes=with_loads(device.processes, samples))
    figures = (device.memory_total_mb, utilization, device.power_draw_w, device.temperature_c, device.processes)
    if driver.failed and figures == (None,) * 5:
        raise _LostError("the driver answers nothing about it")
    return device


def _measure_parts(driver: _Driver, card: _NvmlCard) -> Iterator[Device]:
    """Yield the MIG instances; they are queried each time because they come and go while the card is in use."""
    whole = card.device
    count = driver.ask("nvmlDeviceGetMaxMigDeviceCount", card.handle) if card.is_split else 0
    for place in range(count or 0):
        part = driver.ask("nvmlDeviceGetMigDeviceHandleByIndex", card.handle, place)
        uuid = part and _text(driver.ask("nvmlDeviceGetUUID", part))
        if not uuid:
            continue
        device = Device(id=uuid, vendor=Vendor.NVIDIA, index=place, parent=whole.id, pci_bus_id=whole.pci_bus_id)
        try:
            name = _text(driver.ask("nvmlDeviceGetName", part))
            yield replace(device, name=name, **_memory_and_processes(driver, part))
        except _LostError as lost:
            yield replace(device, fault=str(lost))


def _memory_and_processes(driver: _Driver, handle: Any) -> dict[str, Any]:
    """Return these fields of a device. Processes of all kinds are joined by pid; None if the driver lists no kind."""
    fields: dict[str, Any] = {}
    memory = driver.ask("nvmlDeviceGetMemoryInfo", handle, driver.nvml.nvmlMemory_v2)
    memory = memory or driver.ask("nvmlDeviceGetMemoryInfo", handle)
    if memory is not None:
        fields = {f"memory_{name}_mb": megabytes(getattr(memory, name), "B") for name in ("total", "used", "free")}
    lists = []
    for kind in ("Compute", "Graphics", "MPSCompute"):
        listed = driver.ask(f"nvmlDeviceGet{kind}RunningProcesses_v3", handle)
        if listed is None:
            listed = driver.ask(f"nvmlDeviceGet{kind}RunningProcesses_v2", handle)
        lists += [] if listed is None else [listed]
    if lists:
        entries = chain.from_iterable(lists)
        found = one_per_pid(Process(pid=each.pid, memory_mb=megabytes(each.usedGpuMemory, "B")) for each in entries)
        fields["processes"] = tuple(sorted(found, key=lambda process: process.pid))
    return fields


def _thousandth(figure: int | None) -> float | None:
    """Return watts or joules: NVML counts in mW and mJ."""
    return None if figure is None else figure / 1000


def _text(raw: str | bytes | None) -> str | None:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
