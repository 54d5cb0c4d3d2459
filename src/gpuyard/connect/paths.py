"""The paths of the daemon's files. It imports little, because every command imports it."""

import os

from gpuyard.system.user_directories import state_directory


def state_folder() -> str:
    """Return the folder of `gpuyard.config.state_dir`."""
    return state_directory()


def socket_path() -> str:
    return os.path.join(state_folder(), "daemon.sock")


def lock_path() -> str:
    return os.path.join(state_folder(), "daemon.lock")


def log_path() -> str:
    return os.path.join(state_folder(), "daemon.log")
