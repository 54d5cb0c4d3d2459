"""The usage of the devices in the last day, in a file: a daemon that starts goes on with the history of the one before.

Written once a minute while the machine is sampled, and when the daemon ends, so a daemon that is killed loses a minute.
The file is replaced as a whole: it has the old content or the new. Its size is bounded by the history's own limits. A
file that cannot be read or written is reported once, and nothing depends on it.
"""

import logging
from pathlib import Path

import msgspec
from msgspec import Struct

from gpuyard.system.atomic_files import write_atomically
from gpuyard.system.private_files import PrivateFileError, read_own

NAME = "usage-history"
_FORMAT = 1
_MOST_BYTES = 64 << 20
_log = logging.getLogger(__name__)

# The time at which a step begins, in queue time, and the mean of each column in it; None where nothing was measured.
Point = tuple[float, tuple[float | None, ...]]


class StoredSpan(Struct, frozen=True, kw_only=True):
    """The points of the host, and of each device by its id."""

    host: list[Point]
    devices: dict[str, list[Point]]


class StoredHistory(Struct, frozen=True, kw_only=True):
    """The spans by their names, such as `24h`."""

    spans: dict[str, StoredSpan]
    format: int = _FORMAT


class HistoryFile:
    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._has_failed = False

    def read(self) -> StoredHistory | None:
        """Return the stored history; None if there is none that can be used."""
        try:
            content = read_own(str(self._path))
            found = msgspec.json.decode(content, type=StoredHistory) if len(content) <= _MOST_BYTES else None
        except FileNotFoundError:
            return None
        except (OSError, PrivateFileError, msgspec.MsgspecError) as error:
            _log.warning("%s cannot be read: %s; the history of the GPUs begins anew", self._path, error)
            return None
        return found if found is not None and found.format == _FORMAT else None

    def write(self, history: StoredHistory) -> None:
        """Replace the file. May be called in a thread."""
        try:
            write_atomically(self._path, msgspec.json.encode(history), exact_mode=0o600, is_synced=False)
        except OSError as error:
            if not self._has_failed:
                _log.warning("%s cannot be written: %s; the next daemon lacks this history", self._path, error.strerror)
            self._has_failed = True
        else:
            self._has_failed = False
