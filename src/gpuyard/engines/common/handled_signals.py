"""What /proc says of a process: which signals it handles, and whether it is podman's pause process. Standard library
only: keepers and cluster nodes use it.

Programs around a job's program count as handling no signal: the runner of a task, the tool of a container, its helper
conmon, and a container's first process that waits as an init does. The pause process keeps the user namespace of
rootless podman: it inherits the environment of a job, and must not count as a process of that job."""

import contextlib
import os

_RUNNER = b"from gpuyard.engines.session.runner import main"  # in the code after `python -c`


def handles(pid: int, signum: int) -> bool:
    """Return whether the process handles the signal, or waits for it in all threads. True without /proc (macOS)."""
    if not os.path.isdir("/proc/self/task"):
        return True
    arguments = [b""]
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        arguments = file.read().split(b"\0")
    program = os.path.basename(arguments[0])
    is_tool = program in (b"podman", b"docker", b"conmon") and any(each.startswith(b"gpuyard-") for each in arguments)
    if is_tool or program.startswith(b"Apptainer runtime parent") or any(_RUNNER in each for each in arguments):
        return False
    if _has_bit(f"/proc/{pid}/status", b"SigCgt:", signum):
        return True
    return inner_pid(pid) != 1 and _waits_for(pid, signum)


def inner_pid(pid: int) -> int | None:
    """Return the pid in the process's own PID namespace, as of a container; None if that is ours."""
    numbers = _field(f"/proc/{pid}/status", b"NSpid:")
    return int(numbers[-1]) if len(numbers) > 1 else None


def _waits_for(pid: int, signum: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return bool(threads) and all(_has_bit(f"/proc/{pid}/task/{each}/status", b"SigBlk:", signum) for each in threads)


def _has_bit(path: str, field: bytes, signum: int) -> bool:
    mask = _field(path, field)
    return bool(mask) and bool(int(mask[0], 16) >> (signum - 1) & 1)


def _field(path: str, field: bytes) -> list[bytes]:
    """Return the values of a line; none if the process has ended, or is another user's."""
    try:
        with open(path, "rb") as file:
            return next((line.split()[1:] for line in file if line.startswith(field)), [])
    except OSError:
        return []


def is_pause_process(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read(64) in (b"catatonit\0-P\0", b"podman pause\0"):
                return True
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read(32) == b"podman pause\n"
    except OSError:
        return False
