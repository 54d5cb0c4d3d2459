"""Opens files that belong to this user alone for appending, in folders where other users may have prepared traps.

Refuses symbolic links, hard links to other files, pipes and everything that belongs to another user.
"""

import os
import stat

from gpuyard.errors import EnvironmentFault

_FILE = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_HINT = "remove it, or write to another folder"


class PrivateFileError(EnvironmentFault):
    """Why a file cannot be opened as this user's own."""


def open_private(path: str) -> int:
    """Open a file in a folder that has to be ours too. Creates both, for this user alone."""
    return _open(path, _FOLDER | os.O_NOFOLLOW, is_own=True)


def open_in_shared(path: str) -> int:
    """Open a file of ours in a folder of any user, such as /tmp."""
    return _open(path, _FOLDER, is_own=False)


def _make_folder(place: str) -> None:
    try:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.mkdir(place, 0o700)
    except OSError as error:  # a read-only file system reports that even for an existing folder
        if not os.path.lexists(place):
            path = error.filename or place
            raise PrivateFileError(
                f"{path} cannot be created: {error.strerror}", hint="choose another folder"
            ) from error


def _open(path: str, flags: int, *, is_own: bool) -> int:
    place, name = os.path.split(path)
    _make_folder(place)
    folder = _descriptor(place, flags, None)
    try:
        if is_own and os.fstat(folder).st_uid != os.geteuid():
            raise PrivateFileError(f"the folder {place} belongs to another user", hint=_HINT)
        return _checked(_descriptor(name, _FILE, folder, place), f"{place}/{name}")
    finally:
        os.close(folder)


def _descriptor(name: str, flags: int, within: int | None, place: str = "") -> int:
    try:
        return os.open(name, flags, 0o600, dir_fd=within)
    except OSError as error:
        path = os.path.join(place, name)
        is_link = os.path.islink(path)
        why = "it is a symbolic link" if is_link else error.strerror
        raise PrivateFileError(f"{path} cannot be written: {why}", hint=_HINT) from error


def _checked(file: int, path: str) -> int:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        why = "it is not a regular file"
    elif found.st_uid != os.geteuid():
        why = "it belongs to another user"
    elif found.st_nlink != 1:
        why = "it is a hard link to another file, or has just been removed"
    else:
        return file
    os.close(file)
    raise PrivateFileError(f"{path} cannot be written: {why}", hint=_HINT)
