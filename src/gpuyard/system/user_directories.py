"""The directories of a user's files. It imports little, because every command imports it."""

import os
import sys

from gpuyard.system.file_systems import LOCAL, file_system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuyard.system.local_folder import LocalFolder

# Directories on local disks, which are used as they are named. That stays the same for this process.
_local: set[str] = set()


def user_directory(variable: str, default: str) -> str:
    """Return `GPUYARD_HOME`, or gpuyard's directory by the XDG rules, or the usual one of macOS.

    Ignores a relative path in the XDG `variable`.
    """
    home = os.environ.get("GPUYARD_HOME")
    if home:
        home = os.path.expanduser(home)
        return home if os.path.isabs(home) else os.path.join(os.getcwd(), home)
    named = os.environ.get(variable, "").strip()
    if not os.path.isabs(named):
        named = os.path.expanduser("~/Library/Application Support" if sys.platform == "darwin" else default)
    return os.path.join(named, "gpuyard")


def named_state_directory() -> str:
    """Return the directory for files that must survive a reboot, as the user's settings name it. Other machines may
    share it."""
    return user_directory("XDG_STATE_HOME", "~/.local/state")


def state_directory() -> str:
    """Return the directory that is used for these files: the one that is named, or another on a local disk."""
    named = named_state_directory()
    if named not in _local:
        if file_system(named) not in (None, *LOCAL):
            return find_state_directory().path
        _local.add(named)
    return named


def find_state_directory() -> "LocalFolder":
    from gpuyard.system.local_folder import find_local_folder

    return find_local_folder(named_state_directory())


def shared_directory() -> str | None:
    """Return the directory of this user that other machines see too, for files that they exchange: the one that is
    named, or the usual one in the home. None if both are on local disks."""
    place = find_state_directory()
    if place.problem is not None:
        return place.wanted
    usual = os.path.expanduser("~/.local/state/gpuyard")
    has_home = bool(os.environ.get("GPUYARD_HOME"))  # then nothing outside it is used
    return None if has_home or file_system(usual) in (None, *LOCAL) else usual
