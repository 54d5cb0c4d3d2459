"""A driver for simulated devices: it changes the processes' shares (`gpuyard/simulated_usage.py`)."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from msgspec.structs import replace

from gpuyard import simulated_usage
from gpuyard.config import simulated_devices, state_dir
from gpuyard.core.snapshot import Device
from gpuyard.engines.suspend.move_memory import CudaProcessState, DriverError
from gpuyard.simulated_usage import SharesFolder, SimulatedShare, parse_devices


class Simulated:
    def __init__(self) -> None:
        spec = simulated_devices()
        if spec is None:
            raise DriverError("there are no simulated devices: GPUYARD_SIMULATE is not set")
        self._devices = {device.id: device for device in parse_devices(spec)}
        self._folder = SharesFolder(state_dir() / "simulated")

    @property
    def mutex(self) -> Path:
        return self._folder.lock_path

    def state(self, pid: int) -> CudaProcessState | None:
        with self._locked() as taken:
            mine = [share for share in taken.values() if share.pid == pid]
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
            mine = {path: share for path, share in taken.items() if share.pid == pid}
            fits = all(self._fits(device, mine.values(), taken.values()) for device in self._devices.values())
            is_ruined = not fits or any(share.is_ruined for share in mine.values())
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

    @staticmethod
    def _fits(device: Device, mine: Iterable[SimulatedShare], taken: Iterable[SimulatedShare]) -> bool:
        back_mb = sum((share.suspended_mb.get(device.id, 0.0) for share in mine), 0.0)
        return back_mb <= simulated_usage.free_mb(device, taken) + simulated_usage.ROUNDING_MB

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
            for path, share in taken.items():
                if share.pid == pid:
                    _write(path, change(share))


def _write(path: Path, share: SimulatedShare) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        simulated_usage.write(descriptor, share)
    finally:
        os.close(descriptor)
