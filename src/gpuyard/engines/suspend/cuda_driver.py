"""The checkpoint functions of NVIDIA's driver (570 and newer), which move a process's device memory to RAM and back.

Call them only in a process that may hang: a call blocks until the process in question answers.
"""

import ctypes
import time
from collections.abc import Collection

from gpuyard.engines.suspend.move_memory import CudaProcessState, DriverError

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
_NO_CONTEXT = 3  # CUDA_ERROR_NOT_INITIALIZED: a shell, a data loader, a program that has not used its device yet
_ERRORS = {
    1: "the driver calls its device memory invalid, as it does when processes share some",
    2: "the device has not enough free memory",
    304: "the system did not allow it, as for another user's process, or after a failed resume",
    401: "it is in an unexpected state",
    600: "its work on the device did not pause in time",
    801: "the driver does not support something that it uses, such as managed memory",
}
_IN_PROGRESS = (4, 5)  # only newer drivers report these; older ones answer when they are done
_POLL_S = 0.05
_MB = 1048576


class _Arguments(ctypes.Structure):
    """The arguments of each function take 64 bytes; for a lock the first field is the timeout."""

    _fields_ = (("timeout_ms", ctypes.c_uint32), ("reserved", ctypes.c_uint32 * 15))


class Cuda:
    def __init__(self, lock_timeout_s: float) -> None:
        self._lock_timeout_ms = round(lock_timeout_s * 1000)
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise DriverError(f"{LIBRARY} cannot be loaded: {error}") from None
        if not hasattr(self._library, "cuCheckpointProcessLock"):
            raise DriverError("the driver cannot suspend programs: that needs driver 570 or newer")

    def state(self, pid: int) -> CudaProcessState | None:
        state = ctypes.c_int(-1)
        while True:
            code = self._library.cuCheckpointProcessGetState(ctypes.c_int(pid), ctypes.byref(state))
            if code == _NO_CONTEXT:
                return None
            _check(code)
            if state.value not in _IN_PROGRESS:
                return CudaProcessState(state.value)
            time.sleep(_POLL_S)

    def lock(self, pid: int) -> None:
        self._call("Lock", pid, self._lock_timeout_ms)

    def suspend(self, pid: int) -> None:
        self._call("Checkpoint", pid)

    def restore(self, pid: int) -> None:
        # Without persistence mode an unused card powers down, and a restore does not wake it.
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
        return float(sum(process.usedGpuMemory or 0 for process in running if process.pid in pids)) / _MB

    def _call(self, name: str, pid: int, timeout_ms: int = 0) -> None:
        arguments = _Arguments(timeout_ms=timeout_ms)
        function = getattr(self._library, f"cuCheckpointProcess{name}")
        _check(function(ctypes.c_int(pid), ctypes.byref(arguments)))


def _check(code: int) -> None:
    if code:
        raise DriverError(f"{_ERRORS.get(code, 'the driver refused')} (error {code})")


def _memory_mb(device_id: str) -> tuple[float, float]:
    """Return free and used memory."""
    import pynvml

    try:
        pynvml.nvmlInit()
        memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(device_id))
    except pynvml.NVMLError as error:
        raise DriverError(f"NVML: {error}") from None
    return memory.free / _MB, memory.used / _MB
