"""Lists and removes log files of jobs, and selects those that are beyond the limits of `[keep]`.

It is called in a thread, and sleeps now and then: other threads wait 5 ms for Python's global lock unless its holder
sleeps.
"""

import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from gpuyard.errors import EnvironmentFault

# Only what gpuyard names so is ever removed: 17.1.log, of attempt 1 of job 17.
_NAME = re.compile(r"(\d{1,18})\.\d{1,9}\.[a-z.]+", re.ASCII)
_FILES_PER_PAUSE, _PAUSE_S = 100, 0.001
_BLOCK = 512


class LogFile(Struct, frozen=True):
    path: str
    job_id: int
    size: int  # on disk: what was cut out of its middle does not count
    changed_at: float


def list_logs(folders: Iterable[Path]) -> list[LogFile]:
    """Return all logs in these folders, those that changed first at the front. Raises EnvironmentFault if a folder
    cannot be read."""
    found = []
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                for number, entry in enumerate(entries):
                    if (log := _log_file(entry)) is not None:
                        found.append(log)
                    _pause(number)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            hint = "see the owner and mode of this folder"
            raise EnvironmentFault(f"{folder} cannot be read: {error.strerror}", hint=hint) from error
    return sorted(found, key=lambda log: log.changed_at)


def _log_file(entry: "os.DirEntry[str]") -> LogFile | None:
    match = _NAME.fullmatch(entry.name)
    if match is None or not entry.is_file(follow_symlinks=False):
        return None
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # it was removed since the folder was read
        return None
    size = min(status.st_size, status.st_blocks * _BLOCK)
    return LogFile(entry.path, int(match[1]), size, status.st_mtime)


def surplus(logs: Sequence[LogFile], kept: Collection[int], old: Collection[int], most: float | None) -> list[LogFile]:
    """Return the logs of the jobs `old`, and the first of the others as long as all together are larger than `most`.

    Logs of the jobs `kept` count, and are never among them.
    """
    total = sum(log.size for log in logs)
    found = []
    for log in sorted(logs, key=lambda each: each.job_id not in old):
        if log.job_id in kept or (log.job_id not in old and (most is None or total <= most)):
            continue
        total -= log.size
        found.append(log)
    return found


def remove_logs(logs: Iterable[LogFile]) -> tuple[list[LogFile], str | None]:
    """Return the logs that were removed, and why another could not be removed, if so."""
    removed, problem = [], None
    for number, log in enumerate(logs):
        try:
            os.unlink(log.path)
            removed.append(log)
        except FileNotFoundError:
            continue
        except OSError as error:
            problem = f"{log.path} cannot be removed: {error.strerror}"
        _pause(number)
    return removed, problem


def _pause(number: int) -> None:
    if number % _FILES_PER_PAUSE == _FILES_PER_PAUSE - 1:
        time.sleep(_PAUSE_S)
