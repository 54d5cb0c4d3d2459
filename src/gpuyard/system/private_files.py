"""Opens folders and files that belong to this user alone, where other users may have prepared traps. It imports little,
because every command imports it.

*This user's folder* (`check_folder`, `open_folder`, `open_own`): no other user but root can change what its path leads
to, as with StrictModes of sshd. It belongs to us, and only we can write to it, whatever its sticky bit.
- Every folder and every symbolic link on the path belongs to us or root. Others cannot write to these folders, unless
  they are sticky, as /tmp: there they cannot replace what belongs to us or root.
- A user's private group, of the same name and without other members, is the user; an access control list is not.
- Where a container shows unknown owners as nobody, such folders on the path are accepted; the last must be ours.

*A file in any folder* (`open_in_shared`) is opened relative to its folder and checked once it is open. Symbolic links,
hard links to other files, pipes and everything that belongs to another user are refused."""

import os
import stat

from gpuyard.errors import EnvironmentFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# A larger file is no configuration, and may be larger than the memory.
MOST_CONFIGURED = 1 << 20
_HINT = "remove it, or write to another folder"
_OTHER_HOME = "set GPUYARD_HOME to another folder"


class PrivateFileError(EnvironmentFault):
    """Why a file or folder cannot be used as this user's own."""


def check_folder(path: str, instead: str = _OTHER_HOME) -> os.stat_result | None:
    """Return the status of this user's folder, or None if it does not exist. Raises PrivateFileError if others can
    change it, or what its path leads to; `instead` is the advice for those who cannot mend it."""
    found = _follow(path, instead)[1]
    if found is None:
        return None
    if not stat.S_ISDIR(found.st_mode):
        raise PrivateFileError(f"{path} is not a folder", hint=f"move it away, or {instead}")
    if found.st_uid != os.geteuid():
        raise PrivateFileError(
            f"the folder {path} belongs to {_named(found.st_uid)}, and not to you",
            hint=f"{instead}; if you trust all that is in it: `chown -R {os.geteuid()} {path}`",
        )
    if _is_open_to_others(path, found):
        hint = f"if all in it is yours, `chmod go-w {path}`; or {instead}"
        raise PrivateFileError(f"other users can write to {path}", hint=hint)
    return found


def open_folder(path: str, instead: str = _OTHER_HOME) -> int:
    """Open this user's folder. Raises OSError if it does not exist or cannot be opened."""
    found = check_folder(path, instead)
    if found is None:
        import errno  # most commands do not need it

        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return _same(os.open(path, _FOLDER), found, path)


def _same(file: int, found: os.stat_result, path: str) -> int:
    if not os.path.samestat(os.fstat(file), found):
        os.close(file)
        raise PrivateFileError(f"{path} was replaced while it was opened", hint="try again")
    return file


def make_folder(path: str, instead: str = _OTHER_HOME, *, is_closed: bool = False) -> None:
    """Check this user's folder. Creates it and the folders above it that are missing, for this user alone. `is_closed`:
    take all permissions on it from others."""
    if check_folder(path, instead) is None:
        _make_folder(path, instead, 0o700)
    folder = open_folder(path, instead)
    try:
        if is_closed and stat.S_IMODE(os.fstat(folder).st_mode) & 0o077:
            os.fchmod(folder, 0o700)
    finally:
        os.close(folder)


def open_own(path: str, flags: int = APPEND) -> int:
    """Open a file of ours in this user's folder. Raises OSError if it cannot be opened, or if the folder does not
    exist."""
    above, name = os.path.split(path)
    folder = open_folder(above)
    try:
        return _open_in(folder, above, name, flags)
    except IsADirectoryError as error:
        hint = "move it away: gpuyard has a file of its own there"
        raise PrivateFileError(f"{path} is a folder", hint=hint) from error
    finally:
        os.close(folder)


def check_entries(path: str) -> None:
    """Refuse this user's folder if something in it belongs to another user, from a time when others could write to
    it."""
    with os.scandir(path) as entries:
        for entry in entries:
            owner = entry.stat(follow_symlinks=False).st_uid
            if owner not in (0, os.geteuid()):
                message = f"{entry.path} belongs to {_named(owner)}, in a folder of yours"
                raise PrivateFileError(message, hint=f"remove it, or {_OTHER_HOME}")


def read_trusted(path: str) -> bytes:
    """Return the content of a configuration file that only this user and root can change, also through links of theirs.
    Raises FileNotFoundError if it does not exist."""
    with open(open_trusted(path), "rb") as file:
        return read_small(file, path)


def read_small(file: "BinaryIO", path: str) -> bytes:
    """Return the content of a configuration file. Raises PrivateFileError if it is too large for one."""
    content = file.read(MOST_CONFIGURED + 1)
    if len(content) > MOST_CONFIGURED:
        message = f"{path} is too large: configuration has at most 1 MB"
        raise PrivateFileError(message, hint="see what is in it; was another file meant?")
    return content


def open_trusted(path: str, instead: str = _OTHER_HOME) -> int:
    """Open a file for reading, as `read_trusted` does."""
    real, found = _follow(path, instead)
    if found is None:
        raise FileNotFoundError(path)
    if found.st_uid not in (0, os.geteuid()):
        message = f"{path} belongs to {_named(found.st_uid)}, and not to you"
        raise PrivateFileError(message, hint=f"remove it, or {instead}")
    if _is_open_to_others(real, found):
        hint = f"check its content, then `chmod go-w {path}`; or {instead}"
        raise PrivateFileError(f"other users can write to {path}", hint=hint)
    return _same(os.open(real, os.O_RDONLY | _SAFELY), found, path)


def _follow(path: str, instead: str) -> tuple[str, os.stat_result | None]:
    """Follow a path as the kernel does, and check every folder and link on the way. Return the path without links and
    the status of its end, None if it does not exist."""
    os.path.exists(path)  # mounts what an automounter has on the way
    pending = os.path.join(os.getcwd() if path[:1] != "/" else "/", path).split("/")[::-1]
    at, links = "/", 0
    while pending:
        name = pending.pop()
        if name in ("", ".", ".."):
            at = os.path.dirname(at) if name == ".." else at
            continue
        _check_above(at, path, instead)
        below = os.path.join(at, name)
        try:
            found = os.lstat(below)
        except (FileNotFoundError, NotADirectoryError):
            return below, None
        except OSError as error:
            raise PrivateFileError(f"{below} cannot be used: {error.strerror}", hint=instead) from error
        if not stat.S_ISLNK(found.st_mode):
            at = below
            continue
        links += 1
        if links > 40:  # as in the kernel
            raise PrivateFileError(f"{below} leads through too many symbolic links", hint=instead)
        if found.st_uid not in (0, os.geteuid()) and not _is_unmapped(found.st_uid):
            message = f"the symbolic link {below} belongs to {_named(found.st_uid)}"
            raise PrivateFileError(message, hint=f"remove it, or {instead}")
        target = os.readlink(below)
        pending += target.split("/")[::-1]
        at = "/" if target.startswith("/") else at
    return at, os.lstat(at)


def _check_above(folder: str, path: str, instead: str) -> None:
    """Check a folder on the way to `path`: others must not be able to replace what is in it."""
    found = os.lstat(folder)
    if found.st_uid not in (0, os.geteuid()) and not _is_unmapped(found.st_uid):
        message = f"{path} is in {folder}, which belongs to {_named(found.st_uid)}"
        raise PrivateFileError(message, hint=f"{instead}, in one of yours")
    if not found.st_mode & stat.S_ISVTX and _is_open_to_others(folder, found):
        raise PrivateFileError(
            f"other users can write to {folder}, and so replace {path}",
            hint=f"`chmod go-w {folder}`, or `chmod +t {folder}` if they have to write there; or {instead}",
        )


def _is_open_to_others(path: str, found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    if not found.st_mode & stat.S_IWGRP:
        return False
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
    except KeyError:
        return True
    # Most systems make a group for each user: others have none of that name as their own, and no one was added to it.
    is_private = user.pw_gid == found.st_gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
    try:
        # The group's permissions may be those of users that an access control list names.
        os.getxattr(path, "system.posix_acl_access", follow_symlinks=False)
    except (OSError, AttributeError):  # there is none; not Linux
        return not is_private
    return True


def _is_unmapped(uid: int) -> bool:
    """Whether the kernel shows this owner in place of all that the user namespace of our container does not know."""
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as number, open("/proc/self/uid_map") as users:
            mapped = sum(int(line.split()[2]) for line in users)
            return uid == int(number.read()) and mapped < 0xFFFFFFFF
    except (OSError, ValueError, IndexError):
        return False


def _named(uid: int) -> str:
    import pwd

    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"


def open_in_shared(path: str, *, is_own: bool = False) -> int:
    """Open a file of ours in a folder of any user, such as /tmp, for appending. Creates both. `is_own`: the folder has
    to be ours, too."""
    place = os.path.dirname(path)
    _make_folder(place, "choose another folder", 0o777)
    try:
        return open_to_append(path, is_own=is_own)
    except OSError as error:
        culprit = place if error.filename == place else path
        raise PrivateFileError(f"{culprit} cannot be written: {error.strerror}", hint=_HINT) from error


def open_to_append(path: str, mode: int = 0o600, *, is_own: bool = False) -> int:
    """Open a file of ours in an existing folder of any user. Creates the file with `mode`. Raises OSError."""
    place, name = os.path.split(path)
    folder = _descriptor(place, _FOLDER | (os.O_NOFOLLOW if is_own else 0))
    try:
        if is_own and os.fstat(folder).st_uid != os.geteuid():
            raise PrivateFileError(f"the folder {place} belongs to another user", hint=_HINT)
        return _open_in(folder, place, name, APPEND, mode)
    finally:
        os.close(folder)


def read_own(path: str) -> bytes:
    """Return the content of a file of ours in a folder of any user. Raises FileNotFoundError if it does not exist."""
    with open(_open_in(None, "", path, os.O_RDONLY), "rb") as file:
        return file.read()


def _make_folder(path: str, instead: str, mode_above: int) -> None:
    """Create the folder for this user alone, and those above it that are missing with another mode."""
    try:
        _make_missing(os.path.dirname(path), mode_above)
        os.mkdir(path, 0o700)
    except OSError as error:  # a read-only file system reports that even for an existing folder
        if not os.path.lexists(path):
            place = error.filename or path
            raise PrivateFileError(f"{place} cannot be created: {error.strerror}", hint=instead) from error


def _make_missing(path: str, mode: int) -> None:
    if os.path.isdir(path):
        return
    _make_missing(os.path.dirname(path), mode)
    try:
        os.mkdir(path, mode)
    except FileExistsError:  # made by another process just now, or not a folder
        if not os.path.isdir(path):
            raise


def _open_in(folder: int | None, place: str, name: str, flags: int, mode: int = 0o600) -> int:
    """Open a file of ours in an open folder, whose path is `place`."""
    file, path = _descriptor(name, flags | _SAFELY, folder, place, mode), os.path.join(place, name)
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


def _descriptor(name: str, flags: int, within: int | None = None, place: str = "", mode: int = 0o600) -> int:
    try:
        return os.open(name, flags, mode, dir_fd=within)
    except OSError as error:
        path = os.path.join(place, name)
        if os.path.islink(path):
            raise PrivateFileError(f"{path} cannot be written: it is a symbolic link", hint=_HINT) from error
        raise
