"""Processes of one run: all of them are found below its outer process, and none of them survives it.

As root, the outer process is the first of a pid and mount namespace. It is the reaper of all orphans, so that daemon,
keepers and jobs are always found below it.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import psutil

_NAMESPACE = "GPUYARD_TORTURE_NAMESPACE"
_SET_CHILD_SUBREAPER = 36
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def is_in_namespace() -> bool:
    return _NAMESPACE in os.environ


def can_unshare() -> bool:
    if os.geteuid() != 0 or is_in_namespace() or shutil.which("unshare") is None:
        return False
    return subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode == 0


def run_in_namespace(module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module` in namespaces of its own, and return its exit status."""
    os.environ[_NAMESPACE] = "1"
    return subprocess.run([*_UNSHARE, sys.executable, "-m", module, *arguments], check=False).returncode


def reap_for(act: Callable[[int], int]) -> int:
    """Call `act` in a child with our pid, reap all orphans meanwhile, and return what the child returned."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    outer = os.getpid()
    child = os.fork()
    if child == 0:
        os._exit(act(outer))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child gets it, too
    while True:
        pid, status = os.wait()
        if pid == child:
            _kill_rest(outer)
            return os.waitstatus_to_exitcode(status)


def _kill_rest(outer: int) -> None:
    for process in psutil.Process(outer).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
