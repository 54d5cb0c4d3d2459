"""What a keeper is sent and what it sends, and what it knows of its jobs. Uses the standard library alone, as the
keeper does.
"""

import errno
import marshal
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from gpuyard.engines.common.handled_signals import is_pause_process
from gpuyard.engines.common.spawn_program import SpawnSpec

# Variables of a job that all its processes inherit.
_MARKS = ("GPUYARD_JOB_ID", "GPUYARD_ATTEMPT", "GPUYARD_QUEUE")


class KeptLaunch(NamedTuple):
    """How to start the attempt with this key."""

    key: str
    spec: SpawnSpec


# The number of leases that come with a message; whether a slice has one of them, and its launches; or the keys of
# launches that are withdrawn.
Message = int | tuple[bool, list[tuple[str, tuple[object, ...]]]] | list[str]


def frame(message: Message) -> bytes:
    """Encode a message for the connection to the keeper."""
    body = marshal.dumps(message)
    return len(body).to_bytes(4, "big") + body


def slice_message(launches: Sequence[KeptLaunch], *, has_lease: bool) -> Message:
    """Return the message that starts a slice. Values that its environments share are sent once: `marshal` knows them
    again."""
    return has_lease, [(launch.key, tuple(launch.spec)) for launch in launches]


class Slice:
    """Launches that run one after the other with one lease. Most are one launch. `rest` are those that have not
    started."""

    __slots__ = ("has_lease", "lease", "rest")

    def __init__(self, has_lease: bool, launches: list[tuple[str, tuple[object, ...]]]) -> None:  # noqa: FBT001
        self.has_lease = has_lease
        self.lease: int | None = None
        self.rest = deque(KeptLaunch(key, SpawnSpec._make(spec)) for key, spec in launches)


class KeptJob:
    """A job whose program runs, or whose processes that were left behind run."""

    __slots__ = ("key", "logs", "marks", "slice")

    def __init__(self, launch: KeptLaunch, started: Slice) -> None:
        self.key, self.slice = launch.key, started
        # Not files of the user, which others may write to.
        self.logs = {path: cap for path, cap in launch.spec.outputs if cap}
        environment = launch.spec.environment
        self.marks = {os.fsencode(f"{name}={environment[name]}") for name in _MARKS if name in environment}

    def owns(self, pid: int) -> bool:
        """Return whether a process that we adopted is the job's, by its environment or because it writes to the log.

        Also if that cannot be found out at the moment: a GPU must not be given to others while it may be in use.
        """
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if self.marks and self.marks.issubset(file.read().split(b"\0")):
                    return not is_pause_process(pid)
            return any(os.readlink(f"/proc/{pid}/fd/{name}") in self.logs for name in os.listdir(f"/proc/{pid}/fd"))
        except OSError as error:  # it has ended, or is another user's
            return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class DaemonLink:
    """A connected daemon and the lines that it has not received yet. None is skipped: it would wait forever."""

    def __init__(self, link: socket.socket) -> None:
        link.settimeout(0)
        self.link = link
        self.unsent = bytearray()
        self.is_full = False  # as the poll knows it: it reports when more can be sent

    def send(self) -> bool:
        """Return False if the daemon is gone; the next one reads the journal."""
        try:
            del self.unsent[: self.link.send(self.unsent)]
        except BlockingIOError:
            return True
        except OSError:
            self.unsent.clear()
            return False
        return True
