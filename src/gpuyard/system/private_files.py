"""Files that are this user's alone, opened for appending in places where others may have been before.

What waits there under the name is never followed, never shared and never waited for: not a symbolic link, not a second
name of some other file, not a pipe, and nothing that belongs to somebody else.
"""

import os
import stat

from gpuyard.errors import EnvironmentFault

_FILE = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_HINT = "remove what is there, or write to another folder"


class PrivateFileError(EnvironmentFault):
    """The message says what stands in the way of a file that only its owner reads and writes."""


def open_private(path: str) -> int:
    """A file in a folder that is ours as well; both are made, for us alone, where they are missing."""
    place, name = os.path.split(path)
    _make_folder(place)
    return _open(place, name, _FOLDER | os.O_NOFOLLOW, is_own=True)


def open_in_shared(path: str) -> int:
    """A file of ours in a folder that may be anybody's, such as /tmp."""
    place, name = os.path.split(path)
    _make_folder(place)
    return _open(place, name, _FOLDER, is_own=False)


def _make_folder(place: str) -> None:
    try:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.mkdir(place, 0o700)
    except OSError as error:  # a file system that may not be written says so even of what is there
        if not os.path.lexists(place):
            path = error.filename or place
            raise PrivateFileError(f"{path} cannot be made: {error.strerror}", hint="choose another folder") from error


def _open(place: str, name: str, flags: int, *, is_own: bool) -> int:
    folder = _descriptor(place, flags, None)
    try:
        if is_own and os.fstat(folder).st_uid != os.geteuid():
            raise PrivateFileError(f"the folder {place} belongs to somebody else", hint=_HINT)
        return _checked(_descriptor(name, _FILE, folder, place), f"{place}/{name}")
    finally:
        os.close(folder)


def _descriptor(name: str, flags: int, within: int | None, place: str = "") -> int:
    try:
        return os.open(name, flags, 0o600, dir_fd=within)
    except OSError as error:
        path = os.path.join(place, name)
        is_link = os.path.islink(path)
        why = "a symbolic link waits there" if is_link else error.strerror
        raise PrivateFileError(f"{path} cannot be written: {why}", hint=_HINT) from error


def _checked(file: int, path: str) -> int:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        why = "it is no file"
    elif found.st_uid != os.geteuid():
        why = "it belongs to somebody else"
    elif found.st_nlink != 1:
        why = "it is also a file elsewhere, by a hard link, or has just been removed"
    else:
        return file
    os.close(file)
    raise PrivateFileError(f"{path} cannot be written: {why}", hint=_HINT)
