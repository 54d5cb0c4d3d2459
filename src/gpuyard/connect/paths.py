"""The paths of the daemon's files. It imports little, because every command imports it."""

import os
import sys

from gpuyard.errors import EnvironmentFault
from gpuyard.system.user_directories import user_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# A socket's address holds 108 bytes on Linux and 104 on macOS.
_LONGEST_ADDRESS = 100


def state_folder() -> str:
    """Return the folder of `gpuyard.config.state_dir`."""
    return user_directory("XDG_STATE_HOME", "~/.local/state")


def socket_path() -> str:
    return os.path.join(state_folder(), "daemon.sock")


def lock_path() -> str:
    return os.path.join(state_folder(), "daemon.lock")


def log_path() -> str:
    return os.path.join(state_folder(), "daemon.log")


def reach(path: str, act: "Callable[[str], object]") -> None:
    """Call `act`, bind or connect, with a name for `path` that fits into a socket address."""
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        act(path)
        return
    if sys.platform != "linux":
        hint = "name a folder with a shorter path with GPUYARD_HOME"
        raise EnvironmentFault(f"the path {path} is too long for a socket", hint=hint)
    above, name = os.path.split(path)
    folder = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        act(f"/proc/self/fd/{folder}/{name}")
    finally:
        os.close(folder)
