"""NVIDIA's driver, as far as it moves a process's device memory to host memory and back. It came with driver 570.

Only ever used in a process that may hang: a call waits for as long as the process it is about does not answer.
"""

import ctypes
import time
from collections.abc import Collection

from gpuyard.engines.suspend.move_memory import CudaProcessState, DriverError

LIBRARY = "libcuda.so.1"
# A program of its own: it prints why the driver cannot, and nothing where it can.
ASK = f"""
import ctypes
try:
    if not hasattr(ctypes.CDLL("{LIBRARY}"), "cuCheckpointProcessLock"):
        print("the NVIDIA driver cannot move a program's memory away: that came with 570")
except OSError:
    print("{LIBRARY} of the NVIDIA driver cannot be loaded")
"""
_NO_CONTEXT = 3  # CUDA_ERROR_NOT_INITIALIZED: of a shell, a data loader, a program that has not used its device yet
_NOBODY = 304  # CUDA_ERROR_OPERATING_SYSTEM
_WORDS = {
    1: "the driver takes its device memory for invalid, as it does where processes share some",
    2: "the device has not enough free memory",
    _NOBODY: "the system would not let it, as with another user's process or one that was ruined before",
    401: "it is in another state than was thought",
    600: "its work on the device did not pause in time",
    801: "the driver cannot do that with what it uses, such as managed memory",
}
_UNDER_WAY = (4, 5)  # newer drivers tell that they are at work; older ones answer when it is done
_LOOK_AGAIN_S = 0.05
_MB = 1048576


class _Arguments(ctypes.Structure):
    """Whatever the call, its arguments take 64 bytes; the first word of a lock's is its timeout."""

    _fields_ = (("timeout_ms", ctypes.c_uint32), ("reserved", ctypes.c_uint32 * 15))


class Cuda:
    def __init__(self, lock_timeout_s: float) -> None:
        self._lock_timeout_ms = round(lock_timeout_s * 1000)
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise DriverError(f"{LIBRARY} cannot be loaded: {error}") from None
        if not hasattr(self._library, "cuCheckpointProcessLock"):
            raise DriverError("the driver cannot move device memory: that came with 570")

    def state(self, pid: int) -> CudaProcessState | None:
        state = ctypes.c_int(-1)
        while True:
            code = self._library.cuCheckpointProcessGetState(ctypes.c_int(pid), ctypes.byref(state))
            if code == _NO_CONTEXT:
                return None
            _check(code)
            if state.value not in _UNDER_WAY:
                return CudaProcessState(state.value)
            time.sleep(_LOOK_AGAIN_S)

    def lock(self, pid: int) -> None:
        self._call("Lock", pid, self._lock_timeout_ms)

    def suspend(self, pid: int) -> None:
        self._call("Checkpoint", pid)

    def restore(self, pid: int) -> None:
        # Without persistence mode a card that nobody uses sleeps, and a restore does not wake it.
        self._library.cuInit(0)
        self._call("Restore", pid)

    def unlock(self, pid: int) -> None:
        self._call("Unlock", pid)

    def free_mb(self, device_id: str) -> float:
        return _memory_mb(device_id)[0]

    def used_mb(self, device_id: str) -> float:
        return _memory_mb(device_id)[1]

    def held_mb(self, device_id: str, pids: Collection[int]) -> float:
        import pynvml

        try:
            pynvml.nvmlInit()
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(device_id))
        except pynvml.NVMLError as error:
            raise DriverError(f"NVML: {error}") from None
        return float(sum(one.usedGpuMemory or 0 for one in running if one.pid in pids)) / _MB

    def _call(self, name: str, pid: int, timeout_ms: int = 0) -> None:
        arguments = _Arguments(timeout_ms=timeout_ms)
        function = getattr(self._library, f"cuCheckpointProcess{name}")
        _check(function(ctypes.c_int(pid), ctypes.byref(arguments)))


def _check(code: int) -> None:
    if code:
        raise DriverError(f"{_WORDS.get(code, 'the driver refused')} (error {code})")


def _memory_mb(device_id: str) -> tuple[float, float]:
    """Free and used."""
    import pynvml

    try:
        pynvml.nvmlInit()
        memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(device_id))
    except pynvml.NVMLError as error:
        raise DriverError(f"NVML: {error}") from None
    return memory.free / _MB, memory.used / _MB
