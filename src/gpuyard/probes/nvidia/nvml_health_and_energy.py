"""What NVML reports about an NVIDIA card beside its present figures: health, energy, and the load of each process.

- Figures of health that change seldom, or take long to read, are asked for every 10 s, and at once after an event.
  Events are collected at each reading, without waiting and without a thread that a stuck driver could keep from ending.
- A PCIe link counts as narrow only while the card is busy. Memory counts as unreleased when it was in use for 10 s
  without any process; nothing is concluded in a PID namespace, where the driver hides processes.
- The energy counter of an H200 takes 3 ms, so the card's power continues it for 10 s. A reading never falls, unless the
  counter itself has started again.
- The load of a process is that of its newest sample; without one in the last two seconds it was idle. If no sample
  belongs to a listed process, all loads are unknown: in a container pids differ, and the first samples come late."""

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.machine_snapshot import UNEXPLAINED_MB, Device, HealthFigures, Process, Throttle, XidEvent
from gpuyard.policy.numbers import IDLE_PERCENT
from gpuyard.probes.devices_and_processes import pci_bus_id
from gpuyard.probes.kernel_files import names_in, read_text, sees_all_processes
from gpuyard.probes.parse_numbers import words

# What Linux knows without a call of the driver: the cards under /proc, and Xids in the kernel's log. Only Xids written
# after the first call count: an earlier one may have been repaired since.


class KernelCard(Struct, frozen=True, kw_only=True):
    pci_bus_id: str | None
    uuid: str | None = None
    name: str | None = None


def list_kernel_cards(root: Path = Path("/")) -> tuple[KernelCard, ...]:
    """Return the cards in PCI bus order, which is NVIDIA's numbering."""
    folder, found = root / "proc/driver/nvidia/gpus", []
    for name in names_in(folder):
        lines = (read_text(folder / name / "information") or "").splitlines()
        facts = {key.strip(): words(value) for key, _, value in (line.partition(":") for line in lines)}
        uuid = facts.get("GPU UUID")
        # A card that was never initialised has question marks in its UUID.
        own = uuid if uuid and "?" not in uuid else None
        found.append(KernelCard(pci_bus_id=pci_bus_id(name), uuid=own, name=facts.get("Model")))
    return tuple(found)


# `NVRM: Xid (PCI:0000:65:00): 79, pid=1234, GPU has fallen off the bus.`; older drivers leave out `PCI:`.
_XID_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})\): (\d{1,4})\b")


def find_xids(text: str) -> Iterator[tuple[str, int]]:
    """Yield the PCI bus id of the card and the number of each Xid in a text of the kernel's log."""
    for found in _XID_LINE.finditer(text):
        bus_id = pci_bus_id(f"{found[1]}.0")
        if bus_id is not None:
            yield bus_id, int(found[2])


class KernelLog:
    def __init__(self, root: Path = Path("/")) -> None:
        self._path = root / "dev/kmsg"
        self._descriptor: int | None = None
        self._is_open = False

    def new_xids(self) -> list[tuple[str, int]]:
        """Return the cards and Xids of messages since the last call; none at the first call. Never blocks."""
        if not self._is_open:
            self._is_open = True
            with contextlib.suppress(OSError):  # not on this system, or not for this user
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._descriptor, 0, os.SEEK_END)
        elif self._descriptor is not None:
            return list(find_xids("\n".join(_records(self._descriptor))))
        return []


def _records(descriptor: int) -> Iterator[str]:
    for _ in range(1000):  # the rest at the next call, so that a flood of messages does not delay a reading
        try:
            record = os.read(descriptor, 8192)
        except BrokenPipeError:  # messages were overwritten before we read them: the next call gets the oldest
            continue
        except OSError:  # nothing more
            return
        if not record:
            return
        yield record.decode("utf-8", "replace")


# Energy

# Figures that the driver takes long to answer for, or that change seldom.
ASK_RARELY_S = 10.0


class _Counter(Struct):
    """Times are of the monotonic clock. `expected_j` is the counter as last answered, continued by power."""

    asked_at: float
    answered_j: float
    at: float
    power_w: float | None
    expected_j: float
    returned_j: float


class EnergyCounters:
    def __init__(self) -> None:
        self._cards: dict[str, _Counter] = {}

    def read(self, card_id: str, power_w: float | None, now: float, ask: Callable[[], float | None]) -> float | None:
        """Return the joules that the card has used. `ask` asks the driver, and returns None if it has no counter."""
        card = self._cards.pop(card_id, None)
        if card is None or power_w is None or card.power_w is None or now - card.asked_at >= ASK_RARELY_S:
            answered_j = ask()
            if answered_j is None:
                return None
            has_gone_on = card is not None and answered_j >= card.answered_j
            returned_j = max(answered_j, card.returned_j) if card is not None and has_gone_on else answered_j
            card = _Counter(now, answered_j, now, power_w, answered_j, returned_j)
        else:
            card.expected_j += (card.power_w + power_w) / 2 * (now - card.at)
            card.at, card.power_w = now, power_w
            card.returned_j = max(card.returned_j, card.expected_j)
        self._cards[card_id] = card
        return card.returned_j


UNRELEASED_AFTER_S = 10.0
# NVML's own numbers.
_XID, _DOUBLE_BIT_ECC = 8, 2
_THROTTLES = {Throttle.SW_THERMAL: 32, Throttle.HW_THERMAL: 64, Throttle.POWER_BRAKE: 128, Throttle.HW_SLOWDOWN: 8}


class AsksDriver(Protocol):
    """The part of the NVML probe that calls the driver: None where a device does not support the call."""

    nvml: ModuleType

    def ask(self, function: str, *arguments: Any) -> Any: ...


class _CardHealth(Struct):
    """What is kept of a card between readings; times are of the monotonic clock."""

    figures: HealthFigures = HealthFigures()
    rare_asked_at: float = float("-inf")
    throttle_asked_at: float = float("-inf")
    unused_since: float | None = None


class NvmlHealth:
    def __init__(self, root: Path = Path("/"), *, lists_all_processes: bool | None = None) -> None:
        """`lists_all_processes`: whether the driver shows us all processes; by default, outside of containers."""
        self._cards: dict[str, _CardHealth] = {}
        self._kernel_log = KernelLog(root)
        self._lists_all_processes = sees_all_processes(root) if lists_all_processes is None else lists_all_processes
        self._events: Any = None  # NVML's event set
        self._has_asked_for_events = False
        self._is_registered = False
        self._by_handle: dict[int | None, Device] = {}

    def collect_events(self, driver: AsksDriver, cards: Sequence[tuple[Device, Any]]) -> None:
        """Note the Xids since the last reading. `cards` are all cards with their handles."""
        if not self._has_asked_for_events:
            self._has_asked_for_events = True
            self._register(driver, cards)
        for _ in range(64 if self._events is not None else 0):
            if (event := self._next_event(driver.nvml)) is None:
                break
            card = self._by_handle.get(_address(event.device))
            if card is not None and event.eventType & _XID:
                self._note_xid(card.id, int(event.eventData))
            elif card is not None:
                self._card(card.id).rare_asked_at = float("-inf")
        if not self._is_registered:
            by_bus_id = {card.pci_bus_id: card for card, _ in cards}
            for bus_id, code in self._kernel_log.new_xids():
                if bus_id in by_bus_id:
                    self._note_xid(by_bus_id[bus_id].id, code)

    def _register(self, driver: AsksDriver, cards: Sequence[tuple[Device, Any]]) -> None:
        """Ask the driver for events of all cards. Where it refuses for one of them, the kernel's log is read."""
        nvml = driver.nvml
        self._by_handle = {_address(handle): card for card, handle in cards if handle is not None}
        try:
            self._events = nvml.nvmlEventSetCreate()
            for handle in (handle for _, handle in cards if handle is not None):
                supported = nvml.nvmlDeviceGetSupportedEventTypes(handle)
                nvml.nvmlDeviceRegisterEvents(handle, supported & (_XID | _DOUBLE_BIT_ECC), self._events)
            self._is_registered = True
        except nvml.NVMLError:
            self._is_registered = False

    def _next_event(self, nvml: ModuleType) -> Any:
        try:
            return nvml.nvmlEventSetWait_v2(self._events, 0)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_UNINITIALIZED:
                raise
            self._is_registered &= error.value == nvml.NVML_ERROR_TIMEOUT
            return None

    def _note_xid(self, card_id: str, code: int) -> None:
        card = self._card(card_id)
        xids = (*card.figures.xids, XidEvent(code=code, at=time.time()))[-32:]
        card.figures = replace(card.figures, xids=xids)
        card.rare_asked_at = float("-inf")

    def read(self, driver: AsksDriver, handle: Any, device: Device) -> HealthFigures:
        """Return the figures of a card that answers."""
        card, now = self._card(device.id), time.monotonic()
        if now - card.throttle_asked_at > 2.0:
            card.throttle_asked_at = now
            card.figures = replace(card.figures, throttle=_throttle(driver, handle))
        if now - card.rare_asked_at > ASK_RARELY_S:
            card.rare_asked_at = now
            is_busy = (device.utilization_percent or 0.0) > IDLE_PERCENT
            card.figures = _with_rare_figures(card.figures, driver, handle, is_busy=is_busy)
        used_mb, unreleased_mb = device.memory_used_mb, None
        if not self._lists_all_processes or device.processes != () or used_mb is None or used_mb <= UNEXPLAINED_MB:
            card.unused_since = None
        else:
            card.unused_since = now if card.unused_since is None else card.unused_since
            unreleased_mb = used_mb if now - card.unused_since >= UNRELEASED_AFTER_S else None
        if unreleased_mb != card.figures.unreleased_mb:
            card.figures = replace(card.figures, unreleased_mb=unreleased_mb)
        return card.figures

    def lost(self, card_id: str) -> HealthFigures:
        """Return what is known about a card that the driver has lost."""
        return HealthFigures(xids=self._card(card_id).figures.xids, is_lost=True)

    def close(self, nvml: ModuleType | None) -> None:
        """Free the event set before the library is closed. Without `nvml` (after a fork), only forget it."""
        if self._events is not None and nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(self._events)
        self._events, self._has_asked_for_events, self._is_registered = None, False, False

    def _card(self, card_id: str) -> _CardHealth:
        return self._cards.setdefault(card_id, _CardHealth())


def _throttle(driver: AsksDriver, handle: Any) -> tuple[Throttle, ...] | None:
    # The older call is deprecated; the newer one is missing in older drivers.
    for name in ("Event", "Throttle"):
        if (reasons := driver.ask(f"nvmlDeviceGetCurrentClocks{name}Reasons", handle)) is not None:
            return tuple(each for each, mask in _THROTTLES.items() if reasons & mask)
    return None


def _with_rare_figures(before: HealthFigures, driver: AsksDriver, handle: Any, *, is_busy: bool) -> HealthFigures:
    rows = driver.ask("nvmlDeviceGetRemappedRows", handle)
    width = driver.ask("nvmlDeviceGetCurrPcieLinkWidth", handle)
    most = driver.ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
    is_certain = width is not None and most is not None and (is_busy or width >= most)
    return replace(
        before,
        ecc_uncorrected=driver.ask("nvmlDeviceGetTotalEccErrors", handle, 1, 0),  # uncorrected, volatile
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        link_width=width if is_certain else before.link_width,
        link_width_max=most,
    )


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def window_start(samples: Iterable[Any]) -> int:
    """Return the time in microseconds since which samples count, given these samples of NVML."""
    return max(0, max((sample.timeStamp for sample in samples), default=0) - 2_000_000)


def with_loads(processes: Sequence[Process], samples: Sequence[Any]) -> tuple[Process, ...]:
    """Return the processes with their utilization. `samples` are NVML's since the last window began."""
    begins = window_start(samples)
    newest: dict[int, Any] = {}
    for sample in samples:
        known = newest.get(sample.pid)
        is_newer = sample.timeStamp > (begins if known is None else known.timeStamp)
        if is_newer and sample.smUtil <= 100:
            newest[sample.pid] = sample
    if newest.keys().isdisjoint(process.pid for process in processes):
        return tuple(processes)
    loads = {pid: float(sample.smUtil) for pid, sample in newest.items()}
    return tuple(replace(process, utilization_percent=loads.get(process.pid, 0.0)) for process in processes)
