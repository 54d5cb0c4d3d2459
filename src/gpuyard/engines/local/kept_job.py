"""A job of the keeper, and how its launch is sent. Uses the standard library alone, as the keeper does."""

import errno
import marshal
import os

from gpuyard.engines.common.pause_process import is_pause_process
from gpuyard.engines.common.spawn_program import ShellChange, SpawnSpec

# Key, whether it has a lease; the fields of SpawnSpec: command, environment, directory, outputs, stdin, relay, the
# limit on open files, what else differs from our own process, its CPUs, and the folder of its cgroup; then its group. A
# prefetched launch has only variables of its own and no CPUs: it gets all others from the job that it follows.
Launch = tuple[
    str, bool, tuple[str, ...], dict[str, str], str, tuple[tuple[str, int], ...], str, tuple[str, ...], int,
    ShellChange | None, tuple[int, ...], str, int,
]  # fmt: skip
# Variables of a job that all its processes inherit.
_MARKS = ("GPUYARD_JOB_ID", "GPUYARD_ATTEMPT", "GPUYARD_QUEUE")


REPORT_NOW = 0


def frame(part: Launch | int) -> bytes:
    """Encode a launch, the number of leases in a message, or REPORT_NOW, for the connection to the keeper."""
    body = marshal.dumps(part)
    return len(body).to_bytes(4, "big") + body


def spawn_spec(launch: Launch) -> SpawnSpec:
    return SpawnSpec(*launch[2:12])


class KeptJob:
    """A job whose program runs, or whose processes that were left behind run."""

    __slots__ = ("cpus", "environment", "group", "key", "lease", "logs")

    def __init__(self, launch: Launch, lease: int | None) -> None:
        self.key = launch[0]
        self.logs = {path: cap for path, cap in launch[5] if cap}  # not files of the user, which others may write to
        self.lease = lease
        self.cpus, self.group = launch[10], launch[12]
        self.environment = launch[3] if self.group else {name: launch[3][name] for name in _MARKS if name in launch[3]}

    def owns(self, pid: int) -> bool:
        """Return whether a process that we adopted is the job's, by its environment or because it writes to the log.

        Also if that cannot be found out at the moment: a GPU must not be given to others while it may be in use.
        """
        own = self.environment
        marks = {os.fsencode(f"{name}={own[name]}") for name in _MARKS if name in own}
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if marks and marks.issubset(file.read().split(b"\0")):
                    return not is_pause_process(pid)
            return any(os.readlink(f"/proc/{pid}/fd/{name}") in self.logs for name in os.listdir(f"/proc/{pid}/fd"))
        except OSError as error:  # it has ended, or is another user's
            return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

    def followed_by(self, launch: Launch) -> Launch:
        """Return a prefetched launch as it starts in place of this job."""
        environment = {**self.environment, **launch[3]}
        return (*launch[:3], environment, *launch[4:10], self.cpus, *launch[11:])
