"""The paths of the daemon's files. It imports only `os` and `sys`, because every command imports it.

`gpuyard.config.state_dir` names the same folder.
"""

import os
import sys

from gpuyard.errors import EnvironmentFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# A socket's address holds 108 bytes on Linux and 104 on macOS.
_LONGEST_ADDRESS = 100


def state_folder() -> str:
    home = os.environ.get("GPUYARD_HOME")
    if home:
        home = os.path.expanduser(home)
        return home if os.path.isabs(home) else os.path.join(os.getcwd(), home)
    return os.path.join(_platform_folder(), "gpuyard")


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
        raise EnvironmentFault(
            f"the path {path} is too long for a socket",
            hint="name a folder with a shorter path with GPUYARD_HOME",
        )
    above, name = os.path.split(path)
    folder = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        act(f"/proc/self/fd/{folder}/{name}")
    finally:
        os.close(folder)


def _platform_folder() -> str:
    named = os.environ.get("XDG_STATE_HOME", "").strip()
    if os.path.isabs(named):
        return named
    return os.path.expanduser("~/Library/Application Support" if sys.platform == "darwin" else "~/.local/state")
