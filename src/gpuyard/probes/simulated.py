"""Devices that are not there, used by processes that are.

`GPUYARD_SIMULATE=2x24GB` (or `1x80GB,2x24GB`) gives a machine simulated devices. A real process says how much of their
memory and time it takes with a `Usage`; what it takes is its own for as long as it lives, and not a moment longer.

Each process has one file in one folder, and keeps it locked: held means alive, so however a process dies, its share is
free at once. All reading and changing happens under one short lock, so that two processes never get the same memory.
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from gpuyard.config import simulated_devices, state_dir
from gpuyard.core.model import Device, Process, Reading, Vendor
from gpuyard.core.units import parse_size
from gpuyard.errors import EnvironmentFault, ProbeCrashed, SimulatedOutOfMemory, UserError

_GROUP = re.compile(r"(\d{1,4})\s*x\s*(\d.*[a-z])", re.IGNORECASE | re.ASCII)
_IDLE_W, _FULL_W = 25.0, 300.0
_IDLE_C, _FULL_C = 35.0, 75.0
# What is taken in many small steps adds up to a little more or less than the whole.
_ROUNDING_MB = 0.001


class _Share(Struct, frozen=True, kw_only=True):
    """What one process takes, by device id."""

    pid: int
    memory_mb: dict[str, float] = {}
    load_percent: dict[str, float] = {}


def parse_devices(spec: str) -> tuple[Device, ...]:
    """`1x80GB,2x24GB` as three devices with nothing on them."""
    sizes: list[float] = []
    for group in spec.split(","):
        match = _GROUP.fullmatch(group.strip())
        if match is None or int(match[1]) < 1:
            raise UserError(f"'{spec}' does not describe simulated devices", hint="write it as 2x24GB or 1x80GB,2x24GB")
        sizes += [parse_size(match[2])] * int(match[1])
    if min(sizes) <= 0:
        raise UserError(f"'{spec}' describes a device without memory", hint="write it as 2x24GB")
    return tuple(
        Device(
            id=f"SIM-{index}",
            vendor=Vendor.SIMULATED,
            index=index,
            name=f"Simulated {size / 1024:g} GB",
            memory_total_mb=size,
        )
        for index, size in enumerate(sizes)
    )


class SimulatedDevices:
    """The simulated devices of this machine, as all processes that share the folder see them."""

    name = "simulated"
    vendor = Vendor.SIMULATED
    may_hang = True  # the folder's lock may be held by a stopped process

    def __init__(self, spec: str | None = None, folder: Path | None = None) -> None:
        spec = spec or simulated_devices()
        if spec is None:
            raise UserError("there are no simulated devices", hint="set GPUYARD_SIMULATE=2x24GB")
        self.devices = parse_devices(spec)
        self.folder = folder or state_dir() / "simulated"

    def read(self, timeout_s: float) -> Reading:  # noqa: ARG002 - the caller bounds it
        try:
            with self.locked():
                shares = list(self.live_shares())
        except OSError as error:
            raise ProbeCrashed("simulated", f"{self.folder} cannot be used: {error.strerror}") from error
        return Reading(devices=tuple(_loaded(device, shares) for device in self.devices))

    def idle_seconds(self, device_id: str) -> dict[int, float]:
        """How long ago the processes that put no load on the device last changed what they take."""
        with self.locked():
            changed = {path: path.stat().st_mtime for path in self.folder.glob("*.share")}
            shares = list(self.live_shares())
        pids = {share.pid for share in shares if not share.load_percent.get(device_id)}
        now = time.time()
        return {
            pid: max(0.0, now - max(moment for path, moment in changed.items() if path.name.startswith(f"{pid}-")))
            for pid in pids
        }

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        descriptor = self._open_lock()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _open_lock(self) -> int:
        path = self.folder / "lock"
        try:
            # Without O_CREAT first: in a sticky folder the kernel may refuse that on another user's file.
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self.folder.mkdir(parents=True, exist_ok=True)
            return _open_for_all(path, os.O_RDONLY)

    def live_shares(self) -> Iterator[_Share]:
        """Those of living processes; what the dead left behind is cleared away. Only while locked."""
        for path in self.folder.glob("*.share"):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield msgspec.json.decode(os.pread(descriptor, 65536, 0), type=_Share)
            else:
                with contextlib.suppress(PermissionError):  # another user's, in a sticky folder
                    path.unlink()
            finally:
                os.close(descriptor)


class Usage:
    """What this process takes of the simulated devices, until it is closed or the process ends."""

    def __init__(self, devices: SimulatedDevices | None = None) -> None:
        self._devices = devices or SimulatedDevices()
        self._share = _Share(pid=os.getpid())
        try:
            with self._devices.locked():
                path = self._devices.folder / f"{os.getpid()}-{os.urandom(4).hex()}.share"
                self._descriptor = _open_for_all(path, os.O_RDWR | os.O_EXCL)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                self._write(self._share)
        except OSError as error:
            raise EnvironmentFault(
                f"simulated devices cannot be used: {self._devices.folder}: {error.strerror}",
                hint="set GPUYARD_HOME to a folder you may write to",
            ) from error

    def allocate(self, device_id: str, megabytes: float) -> None:
        """Takes that much more memory, or raises SimulatedOutOfMemory and takes nothing."""
        with self._devices.locked():
            shares = list(self._devices.live_shares())
            device = _loaded(self._find(device_id), shares)
            if megabytes > (device.memory_free_mb or 0.0) + _ROUNDING_MB:
                raise SimulatedOutOfMemory(_out_of_memory(device, megabytes))
            held = self._share.memory_mb
            memory = {**held, device_id: held.get(device_id, 0.0) + megabytes}
            self._write(msgspec.structs.replace(self._share, memory_mb=memory))

    def set_load(self, device_id: str, percent: float) -> None:
        self._find(device_id)
        with self._devices.locked():
            load = {**self._share.load_percent, device_id: percent}
            self._write(msgspec.structs.replace(self._share, load_percent=load))

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, device_id: str) -> Device:
        for device in self._devices.devices:
            if device.id == device_id:
                return device
        known = ", ".join(device.id for device in self._devices.devices)
        raise UserError(f"there is no simulated device '{device_id}'", hint=f"there are: {known}")

    def _write(self, share: _Share) -> None:
        encoded = msgspec.json.encode(share)
        os.pwrite(self._descriptor, encoded, 0)
        os.ftruncate(self._descriptor, len(encoded))
        self._share = share


def _open_for_all(path: Path, flags: int) -> int:
    """A new file that every user may read, whatever our umask: others have to see what we take."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.fchmod(descriptor, 0o644)
    return descriptor


def visible_device_ids(devices: SimulatedDevices, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Those that CUDA_VISIBLE_DEVICES lets a program see, in its order; all of them where it is not set."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    ids = [device.id for device in devices.devices]
    if visible is None:
        return tuple(ids)
    by_name = {**{str(index): device_id for index, device_id in enumerate(ids)}, **{i: i for i in ids}}
    return tuple(by_name[name.strip()] for name in visible.split(",") if name.strip() in by_name)


def _loaded(device: Device, shares: list[_Share]) -> Device:
    processes = tuple(
        Process(pid=share.pid, memory_mb=round(share.memory_mb[device.id], 3))
        for share in sorted(shares, key=lambda share: share.pid)
        if share.memory_mb.get(device.id)
    )
    total = device.memory_total_mb or 0.0
    used = sum((process.memory_mb or 0.0 for process in processes), 0.0)
    load = min(100.0, sum((share.load_percent.get(device.id, 0.0) for share in shares), 0.0))
    return msgspec.structs.replace(
        device,
        memory_used_mb=used,
        memory_free_mb=max(0.0, round(total - used, 3)),
        utilization_percent=load,
        power_draw_w=_IDLE_W + (_FULL_W - _IDLE_W) * load / 100,
        power_limit_w=_FULL_W,
        temperature_c=_IDLE_C + (_FULL_C - _IDLE_C) * load / 100,
        processes=processes,
    )


def _out_of_memory(device: Device, megabytes: float) -> str:
    total, free = device.memory_total_mb or 0.0, device.memory_free_mb or 0.0
    return (
        f"CUDA out of memory. Tried to allocate {megabytes / 1024:.2f} GiB. GPU {device.index} has a total capacity of "
        f"{total / 1024:.2f} GiB of which {free / 1024:.2f} GiB is free."
    )
