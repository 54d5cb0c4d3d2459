"""Which signals a process handles, as the system shows it. Standard library only: cluster nodes use it, too."""

import os


def handles(pid: int, signum: int) -> bool:
    """Return whether the process has a handler for the signal, or waits for it with the signal blocked in all threads.

    True where the system does not show this (macOS).
    """
    if not os.path.isdir("/proc/self/task"):
        return True
    if _has_bit(f"/proc/{pid}/status", b"SigCgt:", signum):
        return True
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return bool(threads) and all(_has_bit(f"/proc/{pid}/task/{each}/status", b"SigBlk:", signum) for each in threads)


def _has_bit(path: str, field: bytes, signum: int) -> bool:
    try:
        with open(path, "rb") as file:
            mask = next((line.split()[1] for line in file if line.startswith(field)), b"0")
    except OSError:  # it has ended, or is another user's
        return False
    return bool(int(mask, 16) >> (signum - 1) & 1)
