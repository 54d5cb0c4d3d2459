"""The lease directory of a user's queue, as a file in its state folder: a user has one ledger at a time.

The file `lease-directories` names the directory of the queue, and then earlier ones in which this user still holds
leases.
- Only the daemon writes it, and holds it (a write lock) while it runs. With another directory than the recorded one it
first links this user's leases there: a lock belongs to the file, so the holder holds it in both, without knowing. On
another file system there are no links, so the daemon refuses to move.
- Everything else that claims devices (`gpuyard run`, GPUScheduler) is refused, at each attempt and under the mutex,
while the queue runs with another directory, or this user holds leases in a recorded directory that are missing in its
own."""

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from gpuyard.config import state_dir
from gpuyard.errors import EnvironmentFault, WaitedTooLong
from gpuyard.ledger.drains_and_marks import copy_drains
from gpuyard.ledger.ledger_mutex import hold_mutex, unwritable
from gpuyard.ledger.lock_file import LEASE, MAX_BYTES, SKIPPED_ERRORS, HeldFile, LedgerScan, remove_dead
from gpuyard.model.units import format_count
from gpuyard.system import file_locks as owner_locks
from gpuyard.system.private_files import open_own

RECORD = "lease-directories"


def move_in(folder: Path) -> int:
    """For the daemon: take this user's leases in the recorded directories along into `folder`, and record it. Returns
    the descriptor that holds the record. Raises EnvironmentFault if a lease cannot be taken along. A process that waits
    in an earlier directory is refused at its next attempt (`check_directory`)."""
    record = open_own(str(state_dir() / RECORD), os.O_RDWR | os.O_CREAT)
    try:
        owner_locks.try_hold(record)
        recorded = _read(record)
        left = [each for each in recorded if not _is_same(each, folder) and os.path.isdir(each)]
        with contextlib.ExitStack() as mutexes:
            for each in sorted({folder, *left}) if left else ():
                # A directory that another process keeps locked grants nothing to this user's processes either.
                # Nor does one that lost its sticky bit, or is closed to this user: the daemon must be able to leave it.
                with contextlib.suppress(WaitedTooLong if each == folder else EnvironmentFault):
                    mutexes.enter_context(hold_mutex(each, 2.0))
            for each in left:
                _take_along(each, folder)
            copied = copy_drains(left[0], folder) if left and left[0] == recorded[0] else []
            kept = [each for each in left if _held(each)]
            _write(record, [folder, *kept])
            for drain in copied:  # otherwise it would hold again after a move back
                with contextlib.suppress(OSError):
                    os.unlink(drain)
            for each in left:
                if each not in kept:
                    remove_dead(each)
    except BaseException:
        os.close(record)
        raise
    return record


def recorded_directory() -> Path | None:
    """Return the lease directory of the last daemon."""
    with contextlib.suppress(FileNotFoundError):
        return next(iter(_recorded()), None)
    return None


def _recorded() -> list[Path]:
    record = open_own(str(state_dir() / RECORD), os.O_RDONLY)
    try:
        return _read(record)
    finally:
        os.close(record)


def check_directory(folder: Path) -> None:
    """Raise EnvironmentFault if this user's queue uses another directory, or holds leases that `folder` lacks. Call it
    with the mutex of `folder`: while a daemon moves in, it has all mutexes."""
    try:
        record = os.open(state_dir() / RECORD, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (OSError, EnvironmentFault):
        return  # there is no queue, or no folder for one
    try:
        directories = _read(record) if os.fstat(record).st_uid == os.geteuid() else []
        is_running = owner_locks.is_held(record)
    finally:
        os.close(record)
    others = [each for each in directories if not _is_same(each, folder)]
    if is_running and others and others[0] == directories[0]:
        raise EnvironmentFault(
            f"your queue uses the lease directory {others[0]}, and this program {folder}: both could get the same GPU",
            hint=f"set GPUYARD_LOCK_DIR={others[0]}, or move the queue: `gpuyard daemon restart` with the new setting",
        )
    here = {found.name for found in _held(folder)} if others else set()
    for each in others:
        missing = [found for found in _held(each) if found.name not in here]
        if missing:
            count = format_count(len(missing), "lease")
            raise EnvironmentFault(
                f"you hold {count} in {each} that {folder} lacks: a GPU could be leased twice",
                hint=f"start the queue, which takes them along: `gpuyard daemon start`; or set GPUYARD_LOCK_DIR={each}",
            )


def unlink_lease(folder: Path, name: str) -> None:
    """Remove a lease file of this user, with its links in the recorded directories. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(folder / name)
        others: list[Path] = []
        with contextlib.suppress(EnvironmentFault, OSError):  # there is no queue, or no folder for one
            others = _recorded()
        for each in others:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                if os.path.samestat(os.lstat(each / name), status):
                    os.unlink(each / name)
        os.unlink(folder / name)


def _take_along(earlier: Path, folder: Path) -> None:
    """Link all leases. A copy would need a process that holds it for as long as the program lives."""
    for found in _held(earlier):
        try:
            _link(earlier / found.name, folder / found.name)
        except OSError as error:
            # Another file system, or one without links.
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise unwritable(folder, error) from error
            raise EnvironmentFault(
                f"the queue cannot move from the lease directory {earlier} to {folder}, on another file system, "
                f"while your jobs or scripts hold leases, such as {found.id}",
                hint=f"until they have ended, start it with GPUYARD_LOCK_DIR={earlier}",
            ) from error


def _link(path: Path, new: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        there = os.lstat(new)
        if there.st_uid != os.geteuid():
            raise OSError(errno.EEXIST, f"{new.name} is another user's file", str(new))
        if os.path.samestat(there, os.lstat(path)):
            return
        os.unlink(new)  # a lease that a daemon made again
    os.link(path, new, follow_symlinks=False)


def _held(folder: Path) -> list[HeldFile]:
    """Return the leases of this user that are held, also those without shares."""
    try:
        found = [each for each in LedgerScan(folder).held_files() if each.uid == os.geteuid()]
        return [each for each in found if each.name.endswith(LEASE)]
    except OSError as error:
        # The directory is gone, closed to us, or something else is in its place.
        if error.errno in SKIPPED_ERRORS or error.errno == errno.ENOTDIR:
            return []
        raise  # for example no free descriptors: the leases could be held


def _read(record: int) -> list[Path]:
    """Return the directories. A machine that lost its power may have left zero bytes."""
    lines = os.pread(record, MAX_BYTES, 0).split(b"\n")
    return [Path(os.fsdecode(line)) for line in lines if line.startswith(b"/") and b"\0" not in line]


def _write(record: int, directories: Sequence[Path]) -> None:
    """Write in one call that does not shorten the file: a process killed here leaves the old record or the new one."""
    content = b"".join(b"%s\n" % os.fsencode(each) for each in directories)
    os.pwrite(record, content.ljust(os.fstat(record).st_size, b"\n"), 0)
    os.ftruncate(record, len(content))


def _is_same(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return one == other or os.path.samestat(os.stat(one), os.stat(other))
    return False
