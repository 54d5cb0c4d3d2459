"""Read the whole machine: all vendors' chains in parallel, and the host, within one deadline."""

import contextlib
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from gpuyard.model.machine_snapshot import Device, Host, Problem, Reading, Snapshot, Vendor
from gpuyard.probes.device_links import LinkReader
from gpuyard.probes.devices_and_processes import without_memory_above
from gpuyard.probes.fallback_chain import FallbackChain
from gpuyard.probes.run_tool import Deadline
from gpuyard.system.worker_threads import NoAnswerYet, WorkerThread

if TYPE_CHECKING:
    from gpuyard.ports import Clock

# Integrated GPUs by name. As NVML names them: "NVIDIA GB10", "NVIDIA Thor", "Orin (nvgpu)". As AMD's tools do: "AMD
# Radeon Graphics", "AMD Radeon 780M Graphics", "Rembrandt [Radeon 680M]"; discrete cards are "Radeon RX 7600M XT".
_INTEGRATED = {
    Vendor.NVIDIA: re.compile(r"\b(?:GB10|Thor|Orin|Xavier|Jetson|Tegra)\b", re.IGNORECASE),
    Vendor.AMD: re.compile(
        r"\bRadeon(?:\(TM\))? (?:(?:R\d|Vega \d+|Vega|\d{3}M|\d{4}S) )?Graphics$|\bRadeon \d{3}M\b|\bRadeon 80\d0S\b"
        r"|\b(?:Raven|Picasso|Renoir|Lucienne|Cezanne|Barcelo|Rembrandt|Mendocino|Raphael|Phoenix\d?|Hawk Point|Strix"
        r"|Krackan|Granite Ridge|Van ?Gogh|Kaveri|Carrizo|Stoney)\b",
        re.IGNORECASE,
    ),
    Vendor.APPLE: re.compile(""),
}


_MEMORY = ("memory_total_mb", "memory_used_mb", "memory_free_mb")


class HostProbe(Protocol):
    def read(self) -> Host: ...

    def read_memory(self, host: Host) -> Host:
        """Return an earlier reading of the host with the present RAM, in less than a millisecond."""


class MachineReader:
    """Takes snapshots. Not thread-safe."""

    def __init__(
        self,
        chains: Sequence[FallbackChain],
        host: HostProbe,
        clock: "Clock",
        deadline_s: float,
        links: LinkReader | None = None,
    ) -> None:
        self._chains = [(chain, WorkerThread[Reading](f"gpuyard-{chain.vendor}")) for chain in chains]
        self._host = host
        self._clock = clock
        self._deadline_s = deadline_s
        self._chain_s = deadline_s * 0.85  # the rest is for killing tools and their children
        self._links = links

    def snapshot(self) -> Snapshot:
        deadline = Deadline(self._deadline_s)
        taken_at = self._clock.now()
        finishing = [self._start(chain, worker, deadline) for chain, worker in self._chains]
        host = self._host.read()
        found = assemble(taken_at, host, [finish() for finish in finishing])
        if self._links is None:
            return found
        return replace(found, topology=self._links.topology(found.devices, deadline.left()))

    def read_memory(self, snapshot: Snapshot, device_ids: Collection[str]) -> Snapshot:
        """Return an earlier snapshot with the present memory of these devices, as far as that can be read at little
        cost. A device that was not read again stays the identical object."""
        vendors = {device.vendor for device in snapshot.devices if device.id in device_ids}
        now: dict[str, Device] = {}
        for chain, worker in self._chains:
            if chain.vendor in vendors and worker.start(partial(chain.read_memory, device_ids, self._chain_s)):
                with contextlib.suppress(NoAnswerYet):
                    found = worker.finish(self._deadline_s).devices
                    now |= {device.id: _complete(device, snapshot.host) for device in found}
        devices = tuple(now.get(each.id, each) for each in snapshot.devices)
        return replace(snapshot, devices=devices) if now else snapshot

    def read_host_memory(self, snapshot: Snapshot) -> Snapshot:
        """Return an earlier snapshot with the present RAM of the host."""
        return replace(snapshot, host=self._host.read_memory(snapshot.host))

    def _start(self, chain: FallbackChain, worker: WorkerThread[Reading], deadline: Deadline) -> Callable[[], Reading]:
        if chain.is_resting():
            last_known = chain.last_known()
            return lambda: last_known
        if not worker.start(lambda: chain.read(self._chain_s)):
            return chain.overdue

        def finish() -> Reading:
            try:
                return worker.finish(deadline.left())
            except NoAnswerYet:
                return chain.overdue()

        return finish


def assemble(taken_at: float | None, host: Host, readings: Sequence[Reading]) -> Snapshot:
    """Return one snapshot of several readings, with a problem for each unhealthy device."""
    devices = tuple(_complete(device, host) for reading in readings for device in reading.devices)
    problems = [problem for reading in readings for problem in reading.problems]
    hint = "no work is placed on it; see dmesg"
    for device in (device for device in devices if not device.healthy):
        message = f"{device.name}: {device.fault}" if device.name else str(device.fault)
        problems.append(Problem(source=device.id, kind="unhealthy", message=message, hint=hint, vendor=device.vendor))
    return Snapshot(taken_at=taken_at, host=host, devices=devices, problems=tuple(problems))


def is_integrated(device: Device) -> bool:
    """Return whether the device is part of a processor. An unknown name counts as a card's."""
    if device.is_integrated or (device.vendor is Vendor.INTEL and device.pci_bus_id == "0000:00:02.0"):
        return True
    pattern = _INTEGRATED.get(device.vendor)
    return pattern is not None and pattern.search(device.name or "") is not None


def _complete(device: Device, host: Host) -> Device:
    """Say whether a device is integrated, and correct its memory figures by what is known about host and vendor.

    - A total of zero means that the memory was not read: all three figures are unknown.
    - NVIDIA's integrated GPUs (GB10, Jetson) have no memory of their own: NVML answers "not supported" and `nvidia-smi`
      prints "[N/A]". Such a device has the host's memory, within the host's limits: what is available to the host is
      free.
    - A process cannot hold more than its device has. A larger figure covers something else, such as all devices
      together, so the process's memory on this device is unknown."""
    if is_integrated(device):
        device = replace(device, is_integrated=True)
    if device.memory_total_mb == 0:
        device = replace(device, **dict.fromkeys(_MEMORY))
    is_unread = all(getattr(device, figure) is None for figure in _MEMORY)
    if device.healthy and is_unread and device.vendor is Vendor.NVIDIA and device.is_integrated:
        figures = (host.memory_total_mb, host.memory_used_mb, host.memory_available_mb)
        device = replace(device, **dict(zip(_MEMORY, figures, strict=True)))
    return without_memory_above(device, device.memory_total_mb)
