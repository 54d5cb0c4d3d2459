"""Write files: atomically, so that readers see the old content or the new and never a part; or where a user names.

For a file that a user names, in a folder of any user, no symbolic link on its path is followed unless it belongs to
this user or root, even if another user puts one there meanwhile: each folder is opened relative to the one above it.
The file has to be a regular file of this user without other names, or /dev/null. What this process has open already is
written to as it is: /dev/stdout may be a pipe. It uses the standard library alone."""

import contextlib
import errno
import os
import stat
from pathlib import Path

from gpuyard.errors import EnvironmentFault

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write_atomically(
    path: str | Path, content: bytes, *, mode: int = 0o666, exact_mode: int | None = None, is_synced: bool = True
) -> None:
    """Replace the file, or create it. After an OSError it is as before, and no temporary file is left. `mode`:
    permissions for the file, less those in the umask. `exact_mode`: permissions regardless of the umask; replaces
    `mode`. `is_synced`: write to disk before the file gets its name, so that it survives a power failure."""
    draft = f"{os.path.dirname(path) or '.'}/.{os.urandom(8).hex()}.gpuyard"  # short: `path` may have the longest name
    try:
        with open(os.open(draft, _NEW, mode if exact_mode is None else 0o600), "wb") as file:
            file.write(content)
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
            if exact_mode is not None:
                os.fchmod(file.fileno(), exact_mode)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def sync(path: str | Path) -> None:
    """Write a file to disk, or a folder with the names in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Call `write_atomically`, and raise EnvironmentFault with the path if that fails."""
    try:
        write_atomically(path, content)
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}") from error


_PATH = getattr(os, "O_PATH", 0)  # needs no permission to list a folder
_FOLDER = _PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OPEN_ALREADY = {"/dev/stdout": 1, "/dev/stderr": 2, **{f"/dev/fd/{number}": number for number in range(256)}}


class UnsafePathError(Exception):
    """Another user may have prepared this path; the text says what is in the way."""


def write_results(path: str, content: bytes, *, exact_mode: int | None = None, is_new: bool = False) -> None:
    """Write a file, in an existing folder. Raises EnvironmentFault. `exact_mode`: its permissions, regardless of the
    umask and of those it had. `is_new`: raise FileExistsError rather than replace what it holds."""
    number = _OPEN_ALREADY.get(path)
    try:
        flags, whole = os.O_EXCL if is_new else 0, os.path.join(os.getcwd(), path)
        opened = open_results(whole, flags=flags, makes_folders=False) if number is None else os.dup(number)
        with open(opened, "wb") as file:
            if number is None and stat.S_ISREG(os.fstat(opened).st_mode):  # and not /dev/null
                os.ftruncate(opened, 0)
                if exact_mode is not None:
                    os.fchmod(opened, exact_mode)
            file.write(content)
    except FileExistsError:
        raise
    except OSError as error:
        raise EnvironmentFault(f"'{path}' cannot be written: {error.strerror}") from error
    except UnsafePathError as error:
        raise EnvironmentFault(f"'{path}' cannot be written: {error}", hint="name another file") from error


def open_results(path: str, *, flags: int = 0, makes_folders: bool = True) -> int:
    """Open the file at this absolute path for appending. Raises UnsafePathError, or OSError. A new file and new folders
    get the permissions that the umask leaves."""
    folder, pending, links = os.open("/", _FOLDER), path.split("/")[::-1], 0
    try:
        while True:
            name = pending.pop()
            if name in ("", ".") and pending:
                continue
            if any(pending):
                opened = _open_folder(name, folder, makes_folders=makes_folders)
            else:
                try:
                    opened = os.open(name or ".", _FILE | flags, 0o666, dir_fd=folder)
                except OSError as error:
                    if error.errno != errno.ELOOP:
                        raise
                    opened = _target(name, folder, error)
            if isinstance(opened, str):
                links += 1
                if links > 40:  # as in the kernel
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                pending += opened.split("/")[::-1]
                opened = os.open("/" if opened.startswith("/") else ".", _FOLDER, dir_fd=folder)
            elif not any(pending):
                return _checked(opened, path)
            os.close(folder)
            folder = opened
    finally:
        os.close(folder)


def _open_folder(name: str, above: int, *, makes_folders: bool) -> int | str:
    """Return the folder, or the target of a link."""
    try:
        try:
            return os.open(name, _FOLDER, dir_fd=above)
        except FileNotFoundError:
            if not makes_folders:
                raise
            with contextlib.suppress(FileExistsError):  # made by another process just now
                os.mkdir(name, dir_fd=above)
            return os.open(name, _FOLDER, dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        return _target(name, above, error)


def _target(name: str, folder: int, error: OSError) -> str:
    """Return where a link leads. Raises `error` if it is not a link."""
    if not _PATH:
        found, target = os.stat(name, dir_fd=folder, follow_symlinks=False), os.readlink(name, dir_fd=folder)
    else:
        link = os.open(name, _PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            found = os.fstat(link)
            if not stat.S_ISLNK(found.st_mode):
                raise error
            target = os.readlink("", dir_fd=link)
        finally:
            os.close(link)
    if found.st_uid not in (0, os.geteuid()):
        raise UnsafePathError(f"{name} is a symbolic link of another user")
    return target


def _checked(file: int, path: str) -> int:
    found, why = os.fstat(file), None
    if stat.S_ISCHR(found.st_mode) and os.path.samestat(found, os.stat(os.devnull)):
        pass
    elif not stat.S_ISREG(found.st_mode):
        why = "not a regular file"
    elif found.st_uid != os.geteuid():
        why = "a file of another user"
    elif found.st_nlink != 1:
        why = "a file with a second name (a hard link)"
    if why is not None:
        os.close(file)
        raise UnsafePathError(f"{path} is {why}")
    os.set_blocking(file, True)
    return file
