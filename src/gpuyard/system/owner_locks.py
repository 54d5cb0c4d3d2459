"""Write locks that say "a process of the owner holds this file", and a test for them that takes no lock.

On Linux these are open-file-description locks (F_OFD_SETLK):
- A write lock needs a descriptor that is open for writing. So only users who may write to the file, its owner and root,
  can hold one. The test asks for read locks of others in vain: they do not count.
- The lock belongs to the open file: forked children share it, and it ends with the last copy of the descriptor, or with
  `unhold` by any of them. Other descriptors of the same file may be closed without harm.
- Byte 0 is the lock. A holder that shows that it is not stopped (`beat`) also locks the byte of the present second; a
  lock changes neither the file nor its times, and wakes up no process that watches the directory.

Elsewhere flock is used. There any user who can read the file can hold it, and there are no beats.
"""

import errno
import fcntl
import os
import struct
import time

from gpuyard.system.file_locks import try_lock, unlock

_HAS_OWNER_LOCKS = hasattr(fcntl, "F_OFD_SETLK")
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length (0: to the end), pid
_FIRST_BEAT = 1
_CLOCK_SLACK_S = 2


def try_hold(descriptor: int) -> bool:
    """Hold the file. Return False if another open file holds a lock on it. Needs a descriptor open for writing."""
    if not _HAS_OWNER_LOCKS:
        return try_lock(descriptor)
    try:
        _set(descriptor, fcntl.F_WRLCK, 0, 1)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_held(descriptor: int) -> bool:
    """Return whether another open file holds it. Reading is enough."""
    if not _HAS_OWNER_LOCKS:
        # Shared: readers that test at the same time do not take each other for a holder.
        if not try_lock(descriptor, shared=True):
            return True
        unlock(descriptor)
        return False
    return _is_write_locked(descriptor, 0, 1)


def unhold(descriptor: int) -> None:
    """Release the lock for all processes that share the open file."""
    if _HAS_OWNER_LOCKS:
        _set(descriptor, fcntl.F_UNLCK, 0, 0)
    else:
        unlock(descriptor)


def beat(descriptor: int) -> None:
    """Record that a holder of the file is running now."""
    if _HAS_OWNER_LOCKS:
        now = _FIRST_BEAT + int(time.monotonic())
        _set(descriptor, fcntl.F_WRLCK, now, 1)
        _set(descriptor, fcntl.F_UNLCK, _FIRST_BEAT, now - _FIRST_BEAT)


def has_beaten(descriptor: int, within_s: int) -> bool:
    """Return whether a holder has called `beat` in the last `within_s` seconds; True if that cannot be known.

    The seconds are those of CLOCK_MONOTONIC, which all processes of the machine share, and which stands still while the
    machine sleeps. In a container with a clock of its own (a time namespace) the seconds differ.
    """
    if not _HAS_OWNER_LOCKS:
        return True
    first = max(0, int(time.monotonic()) - within_s)
    return _is_write_locked(descriptor, _FIRST_BEAT + first, within_s + _CLOCK_SLACK_S)


def _set(descriptor: int, kind: int, start: int, length: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))


def _is_write_locked(descriptor: int, start: int, length: int) -> bool:
    asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, start, length, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK
