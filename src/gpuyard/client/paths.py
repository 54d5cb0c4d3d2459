"""The paths of the daemon's files. It imports little, because every command imports it."""

import os

from gpuyard.system.user_directories import state_directory

state_folder = state_directory  # that of `gpuyard.config.state_dir`


def check_state_folder() -> None:
    """Raise EnvironmentFault if the folder cannot hold a database: its name has to be UTF-8."""
    try:
        state_folder().encode()
    except UnicodeEncodeError:
        from gpuyard.errors import EnvironmentFault

        raise EnvironmentFault(
            f"the name of the folder {state_folder()!a} is not UTF-8", hint="set GPUYARD_HOME to another directory"
        ) from None


def socket_path() -> str:
    return os.path.join(state_folder(), "daemon.sock")


def lock_path() -> str:
    return os.path.join(state_folder(), "daemon.lock")


def log_path() -> str:
    return os.path.join(state_folder(), "daemon.log")
