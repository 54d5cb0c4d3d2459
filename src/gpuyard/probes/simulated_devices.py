"""Simulated devices and a simulated host, used by real processes.

`GPUYARD_SIMULATE=2x24GB` (or `1x80GB,2x24GB`) gives a machine simulated devices, `nvidia:1x24GB,amd:2x16GB` devices
that pass for those of two vendors. A real process declares the memory and load it uses with a `SimulatedUse`, which
ends with the process at the latest. A suspended process waits at its next call, as a program that calls a driver does.
The file `health.json` in their folder gives them faults by device id: `{"SIM-0": {"ecc_uncorrected": 1}}`.
`GPUYARD_SIMULATE_HOST=23GB`, or `23GB,8` for 8 CPUs, gives it RAM. All of it is available, whatever programs use."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import replace

from gpuyard import simulated_usage
from gpuyard.config import simulated_devices, state_dir
from gpuyard.errors import EnvironmentFault, ProbeCrashed, SimulatedOutOfMemory, UserError
from gpuyard.model.machine_snapshot import Device, HealthFigures, Host, Process, Reading, Vendor
from gpuyard.model.units import parse_size
from gpuyard.probes.machine_reader import HostProbe
from gpuyard.simulated_usage import SharesFolder, SimulatedShare, parse_devices, pid_namespace

# The variables that select the devices of a vendor, unless it is CUDA_VISIBLE_DEVICES.
_VARIABLES = {Vendor.AMD: "ROCR_VISIBLE_DEVICES", Vendor.INTEL: "ZE_AFFINITY_MASK"}


class SimulatedDevices:
    """The probe of simulated devices; all processes with the same folder see the same devices. With a `vendor` it
    reads only the devices of that vendor."""

    name = "simulated"
    may_hang = True  # the folder's lock may be held by a stopped process

    def __init__(self, spec: str | None = None, folder: Path | None = None, vendor: Vendor = Vendor.SIMULATED) -> None:
        spec = spec or simulated_devices()
        if spec is None:
            raise UserError("no simulated devices are configured", hint="set GPUYARD_SIMULATE=2x24GB")
        self.devices = parse_devices(spec)
        self.vendor = vendor
        self.folder = folder or state_dir() / "simulated"
        self.shares = SharesFolder(self.folder)

    def read(self, timeout_s: float) -> Reading:  # noqa: ARG002 - the caller has a timeout
        try:
            with self.shares.locked():
                taken = list(self.shares.live().values())
                health = _read_health(self.folder / "health.json")
        except OSError as error:
            raise ProbeCrashed("simulated", f"{self.folder} cannot be used: {error.strerror}") from error
        own = [device for device in self.devices if device.vendor is self.vendor]
        if health is not None:
            own = [replace(each, health=health.get(each.id, HealthFigures())) for each in own]
        return Reading(devices=tuple(_loaded(device, taken) for device in own))

    def read_memory(self, devices: Sequence[Device]) -> list[Device]:
        ids = {device.id for device in devices}
        return [device for device in self.read(0.0).devices if device.id in ids]

    def idle_seconds(self, device_id: str) -> dict[int, float]:
        """Return for each process without load on the device the seconds since its last change of use."""
        now = time.time()
        idle_s: dict[int, float] = {}
        with self.shares.locked():
            for path, share in self.shares.live().items():
                with contextlib.suppress(FileNotFoundError):
                    since_s = max(0.0, now - path.stat().st_mtime)
                    if not share.load_percent.get(device_id):
                        idle_s[share.pid] = min(since_s, idle_s.get(share.pid, since_s))
        return idle_s


class SimulatedUse:
    """The simulated memory and load that this process uses, until it is closed or the process ends."""

    def __init__(self, devices: SimulatedDevices | None = None) -> None:
        self._devices = devices or SimulatedDevices()
        folder = self._devices.shares
        try:
            with folder.locked():
                self._descriptor = folder.add(SimulatedShare(pid=os.getpid(), namespace=pid_namespace()))
        except OSError as error:
            raise EnvironmentFault(
                f"simulated devices cannot be used: {self._devices.folder}: {error.strerror}",
                hint="set GPUYARD_HOME to a folder you may write to",
            ) from error

    def allocate(self, device_id: str, megabytes: float) -> None:
        """Allocate memory, or raise SimulatedOutOfMemory and allocate nothing."""
        device = self._find(device_id)
        with self._locked_use() as share:
            free_mb = simulated_usage.free_mb(device, self._devices.shares.live().values())
            if megabytes > free_mb + simulated_usage.ROUNDING_MB:
                raise SimulatedOutOfMemory(simulated_usage.out_of_memory_message(device, megabytes, free_mb))
            memory = {**share.memory_mb, device_id: share.memory_mb.get(device_id, 0.0) + megabytes}
            simulated_usage.write(self._descriptor, replace(share, memory_mb=memory))

    def set_load(self, device_id: str, percent: float) -> None:
        self._find(device_id)
        with self._locked_use() as share:
            load = {**share.load_percent, device_id: percent}
            simulated_usage.write(self._descriptor, replace(share, load_percent=load))

    def work(self) -> None:
        """Return when the process is not suspended, as a driver call would."""
        with self._locked_use():
            pass

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _locked_use(self) -> Iterator[SimulatedShare]:
        """Yield the current use, locked, once the process is not suspended."""
        while True:
            with self._devices.shares.locked():
                share = simulated_usage.read(self._descriptor)
                if share is None:
                    raise EnvironmentFault(f"this process's share in {self._devices.folder} was overwritten")
                if not share.is_locked:
                    yield share
                    return
            time.sleep(0.01)

    def _find(self, device_id: str) -> Device:
        known = {device.id: device for device in self._devices.devices}
        if device_id not in known:
            raise UserError(f"there is no simulated device '{device_id}'", hint=f"there are: {', '.join(known)}")
        return known[device_id]


def visible_device_ids(devices: SimulatedDevices, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids that the variable of each vendor shows, in its order; all of a vendor whose variable is not set.
    Numbers in it count the devices of that vendor."""
    found: list[str] = []
    for vendor in dict.fromkeys(device.vendor for device in devices.devices):
        ids = [device.id for device in devices.devices if device.vendor is vendor]
        visible = environment.get(_VARIABLES.get(vendor, "CUDA_VISIBLE_DEVICES"))
        by_name = {str(index): device_id for index, device_id in enumerate(ids)} | dict(zip(ids, ids, strict=True))
        names = ids if visible is None else [name.strip() for name in visible.split(",")]
        found += (by_name[name] for name in names if name in by_name)
    return tuple(found)


def _read_health(path: Path) -> dict[str, HealthFigures] | None:
    """Return the figures by device id, or None without such a file: then the devices report no health."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, HealthFigures])
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise ProbeCrashed("simulated", f"{path} cannot be read: {error}") from error


def _loaded(device: Device, taken: Iterable[SimulatedShare]) -> Device:
    processes = tuple(
        Process(
            pid=share.pid,
            memory_mb=round(share.memory_mb[device.id], 3),
            utilization_percent=0.0 if share.is_locked else share.load_percent.get(device.id, 0.0),
        )
        for share in sorted(taken, key=lambda share: share.pid)
        if share.memory_mb.get(device.id)
    )
    load = min(100.0, sum((share.load_percent.get(device.id, 0.0) for share in taken if not share.is_locked), 0.0))
    return replace(
        device,
        memory_used_mb=sum((process.memory_mb or 0.0 for process in processes), 0.0),
        memory_free_mb=simulated_usage.free_mb(device, taken),
        utilization_percent=load,
        power_draw_w=25.0 + 275.0 * load / 100,
        power_limit_w=300.0,
        temperature_c=35.0 + 40.0 * load / 100,
        processes=processes,
    )


class SimulatedHost:
    """The figures of `real`, with simulated RAM and CPUs. `used_mb` returns how much RAM is in use."""

    def __init__(self, spec: str, real: HostProbe, used_mb: Callable[[], float] = lambda: 0.0) -> None:
        self._used_mb = used_mb
        size, _, cpus = spec.partition(",")
        self._real, hint = real, "write it as 23GB, or as 23GB,8 for 8 CPUs"
        try:
            self._ram_mb, self._cpus = parse_size(size), int(cpus) if cpus else None
        except (UserError, ValueError):
            raise UserError(f"GPUYARD_SIMULATE_HOST is '{spec}'", hint=hint) from None
        if self._ram_mb <= 0 or (self._cpus is not None and self._cpus < 1):
            raise UserError(f"GPUYARD_SIMULATE_HOST is '{spec}', a machine without RAM or CPUs", hint=hint)

    def read(self) -> Host:
        host = self._real.read()
        return self.read_memory(replace(host, cpu_count=host.cpu_count if self._cpus is None else float(self._cpus)))

    def read_memory(self, host: Host) -> Host:
        available_mb = max(0.0, self._ram_mb - self._used_mb())
        return replace(host, memory_total_mb=self._ram_mb, memory_available_mb=available_mb)
