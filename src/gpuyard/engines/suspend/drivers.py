"""Drivers that move a process's device memory to RAM and back: NVIDIA's (570 and newer), one for simulated devices, and
one that can move nothing.

Call them only in a process that may hang: a call blocks until the process in question answers.
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Collection, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gpuyard import simulated_usage
from gpuyard.config import simulated_devices, state_dir
from gpuyard.engines.suspend.prefault import Prefault
from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.model.units import MB
from gpuyard.simulated_usage import SharesFolder, SimulatedShare, parse_devices

LIBRARY = "libcuda.so.1"
# Python code for a separate process: prints why the driver cannot suspend, or nothing if it can.
CHECK_SUPPORT = f"""
import ctypes
try:
    if not hasattr(ctypes.CDLL("{LIBRARY}"), "cuCheckpointProcessLock"):
        print("the NVIDIA driver cannot suspend programs: that needs driver 570 or newer")
except OSError:
    print("{LIBRARY} of the NVIDIA driver cannot be loaded")
"""
_ERRORS = {
    1: "the driver calls its device memory invalid, as it does when processes share some",
    2: "the device has not enough free memory",
    304: "the system did not allow it, as for another user's process, or after a failed resume",
    401: "it is in an unexpected state",
    600: "its work on the device did not pause in time",
    801: "the driver does not support something that it uses, such as managed memory",
}
_NOT_NVIDIA = "{} is no NVIDIA device, and only NVIDIA's driver can suspend programs"


class CudaProcessState(IntEnum):
    """The numbers are the driver's."""

    RUNNING = 0
    LOCKED = 1
    SUSPENDED = 2
    FAILED = 3


class DriverError(Exception):
    """Why the driver refused."""


class CannotSuspend(DriverError):
    """Why no driver can suspend programs on a device, now or later."""


class _Arguments(ctypes.Structure):
    """The arguments of each function take 64 bytes; for a lock the first field is the timeout."""

    _fields_ = (("timeout_ms", ctypes.c_uint32), ("reserved", ctypes.c_uint32 * 15))


class Cuda:
    """What the driver does with one process. Each method raises DriverError if the driver refuses."""

    refusal: str | None = None  # why it can move nothing

    def __init__(self, lock_timeout_s: float) -> None:
        self._lock_timeout_ms = round(lock_timeout_s * 1000)
        self._devices: list[str] = []
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise CannotSuspend(f"{LIBRARY} cannot be loaded: {error}") from None
        if not hasattr(self._library, "cuCheckpointProcessLock"):
            raise CannotSuspend("the driver cannot suspend programs: that needs driver 570 or newer")

    def check(self, device_id: str) -> None:
        """Raises CannotSuspend if the driver cannot suspend programs on this device."""
        if device_id.startswith("MIG-"):
            raise CannotSuspend(f"{device_id} is a MIG device, and the driver cannot suspend programs on it")
        with _nvml(device_id):
            self._devices.append(device_id)

    def state(self, pid: int) -> CudaProcessState | None:
        """Return None if the process uses no device."""
        state = ctypes.c_int(-1)
        while True:
            code = self._library.cuCheckpointProcessGetState(ctypes.c_int(pid), ctypes.byref(state))
            if code == 3:  # CUDA_ERROR_NOT_INITIALIZED: a shell, a data loader, a program that has not used its device
                return None
            _check(code)
            if state.value not in (4, 5):  # in progress; older drivers answer when they are done
                return CudaProcessState(state.value)
            time.sleep(0.05)

    def lock(self, pid: int) -> None:
        self._call("Lock", pid, self._lock_timeout_ms)

    def suspend(self, pid: int) -> None:
        held = used = 0.0
        with contextlib.suppress(DriverError):
            for device_id in self._devices:
                held, used = held + self.held_mb(device_id, {pid}), used + self.used_mb(device_id)
        with Prefault(pid, round((held or used) * MB)):
            self.checkpoint(pid)

    def checkpoint(self, pid: int) -> None:
        self._call("Checkpoint", pid)

    def restore(self, pid: int) -> None:
        # Without persistence mode an unused card powers down, and a restore does not wake it.
        self._library.cuInit(0)
        self._call("Restore", pid)

    def unlock(self, pid: int) -> None:
        self._call("Unlock", pid)

    def free_mb(self, device_id: str) -> float:
        with _nvml(device_id) as (pynvml, device):
            return float(pynvml.nvmlDeviceGetMemoryInfo(device).free) / MB

    def used_mb(self, device_id: str) -> float:
        with _nvml(device_id) as (pynvml, device):
            return float(pynvml.nvmlDeviceGetMemoryInfo(device).used) / MB

    def held_mb(self, device_id: str, pids: Collection[int]) -> float:
        with _nvml(device_id) as (pynvml, device):
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        return float(sum(process.usedGpuMemory or 0 for process in running if process.pid in pids)) / MB

    def _call(self, name: str, pid: int, timeout_ms: int = 0) -> None:
        arguments = _Arguments(timeout_ms=timeout_ms)
        function = getattr(self._library, f"cuCheckpointProcess{name}")
        _check(function(ctypes.c_int(pid), ctypes.byref(arguments)))


def _check(code: int) -> None:
    if code:
        raise DriverError(f"{_ERRORS.get(code, 'the driver refused')} (error {code})")


@contextlib.contextmanager
def _nvml(device_id: str) -> Iterator[tuple[Any, Any]]:
    import pynvml

    try:
        pynvml.nvmlInit()
        yield pynvml, pynvml.nvmlDeviceGetHandleByUUID(device_id)
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
        raise CannotSuspend(_NOT_NVIDIA.format(device_id)) from None
    except pynvml.NVMLError as error:
        raise DriverError(f"NVML: {error}") from None


class NoDriver:
    """Stands for a driver that can move nothing: what leaves the devices is what a program parks itself."""

    def __init__(self, refusal: str) -> None:
        self.refusal: str | None = refusal

    def state(self, pid: int) -> None:
        """Nothing of a process is known: it is stopped, and continued."""

    def free_mb(self, device_id: str) -> None:
        """Unknown."""

    used_mb = free_mb

    def held_mb(self, device_id: str, pids: Collection[int]) -> float:
        raise DriverError(f"how much {len(pids)} processes hold on {device_id} is unknown")

    def lock(self, pid: int) -> None:
        raise DriverError(f"process {pid}: {self.refusal}")

    suspend = restore = unlock = lock


class Simulated:
    """Changes the shares of processes (`gpuyard/simulated_usage.py`), on devices that pass for NVIDIA's or for none."""

    refusal: str | None = None

    def __init__(self) -> None:
        spec = simulated_devices()
        if spec is None:
            raise DriverError("there are no simulated devices: GPUYARD_SIMULATE is not set")
        self._devices = {device.id: device for device in parse_devices(spec)}
        self._folder = SharesFolder(state_dir() / "simulated")

    def check(self, device_id: str) -> None:
        if self._device(device_id).vendor not in (Vendor.NVIDIA, Vendor.SIMULATED):
            raise CannotSuspend(_NOT_NVIDIA.format(device_id))

    @property
    def mutex(self) -> Path:
        return self._folder.path

    def state(self, pid: int) -> CudaProcessState | None:
        with self._locked() as taken:
            mine = list(_of_process(pid, taken).values())
        if not mine:
            return None
        if any(share.is_suspended for share in mine):
            return CudaProcessState.SUSPENDED
        return CudaProcessState.LOCKED if any(share.is_locked for share in mine) else CudaProcessState.RUNNING

    def lock(self, pid: int) -> None:
        self._change(pid, lambda share: replace(share, is_locked=True))

    def suspend(self, pid: int) -> None:
        self._change(pid, lambda share: replace(share, memory_mb={}, suspended_mb=share.memory_mb, is_suspended=True))

    def restore(self, pid: int) -> None:
        with self._locked() as taken:
            mine = _of_process(pid, taken)
            is_ruined = any(share.is_ruined for share in mine.values())
            for device in self._devices.values():
                back_mb = sum((share.suspended_mb.get(device.id, 0.0) for share in mine.values()), 0.0)
                free_mb = simulated_usage.free_mb(device, taken.values())
                is_ruined = is_ruined or back_mb > free_mb + simulated_usage.ROUNDING_MB
            for path, share in mine.items():
                back = replace(share, memory_mb=share.suspended_mb, suspended_mb={}, is_suspended=False)
                _write(path, replace(share, is_ruined=True) if is_ruined else back)
        if is_ruined:
            raise DriverError("the device has not enough free memory (error 2)")

    def unlock(self, pid: int) -> None:
        self._change(pid, lambda share: replace(share, is_locked=False))

    def free_mb(self, device_id: str) -> float:
        with self._locked() as taken:
            return simulated_usage.free_mb(self._device(device_id), taken.values())

    def held_mb(self, device_id: str, pids: Collection[int]) -> float:
        with self._locked() as taken:
            return sum((each.memory_mb.get(device_id, 0.0) for each in taken.values() if each.pid in pids), 0.0)

    def used_mb(self, device_id: str) -> float:
        return (self._device(device_id).memory_total_mb or 0.0) - self.free_mb(device_id)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[dict[Path, SimulatedShare]]:
        try:
            with self._folder.locked():
                yield self._folder.live()
        except OSError as error:
            raise DriverError(f"{error.filename or self._folder.path}: {error.strerror}") from None

    def _device(self, device_id: str) -> Device:
        if device_id not in self._devices:
            raise DriverError(f"there is no simulated device {device_id}")
        return self._devices[device_id]

    def _change(self, pid: int, change: Callable[[SimulatedShare], SimulatedShare]) -> None:
        with self._locked() as taken:
            for path, share in _of_process(pid, taken).items():
                _write(path, change(share))


def _of_process(pid: int, taken: dict[Path, SimulatedShare]) -> dict[Path, SimulatedShare]:
    """Return the shares of a process of this user. Another user's file may name any process."""
    mine = {path: share for path, share in taken.items() if share.pid == pid}
    return {path: share for path, share in mine.items() if path.stat().st_uid == os.geteuid()}


def _write(path: Path, share: SimulatedShare) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        simulated_usage.write(descriptor, share)
    finally:
        os.close(descriptor)
