"""Paths and frames that commands share."""

import os

from gpuyard.errors import UserError
from gpuyard.ui.cli.terminal import is_unicode, terminal_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuyard.core.snapshot import Snapshot
    from gpuyard.ui.views import Frame


def absolute(path: str) -> str:
    if not path:
        raise UserError("a path is empty", hint="name a folder, or leave the option out")
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise UserError("the current directory no longer exists", hint="change to another one") from None


def frame() -> "Frame":
    from gpuyard.ui.views import Frame

    return Frame(width=terminal_size()[0], is_unicode=is_unicode())


def pids_of(snapshot: "Snapshot") -> set[int]:
    return {process.pid for device in snapshot.devices for process in device.processes or ()}
