"""Where a program listens that can park its GPU memory itself, and what is said there.

A program that can move its GPU memory to RAM by itself listens on a unix socket in the folder of its queue (`bind`);
that the socket exists is its registration. The process that suspends a job looks for it (`path_of`), connects, and
sends one request per connection:

| request | the program answers, once that is so | with |
| --- | --- | --- |
| `park` | `parked` | the number of bytes of GPU memory that it has moved to RAM; it then waits |
| `return` | `returned` | nothing; its GPU memory is back, and it goes on. Also if it had not parked |
| either | `refused` | why it cannot |

- `park` is fulfilled between two steps of the program. If the connection is closed before the answer, the request is
  withdrawn: the program goes on, with its memory where it was.
- Both sides check that the other is a process of the same user (`user_sockets`).
"""

import contextlib
import os
from collections.abc import Mapping

PARK, RETURN = b"park", b"return"
PARKED, RETURNED, REFUSED = "parked", "returned", "refused"
LONGEST_LINE = 4096
_FOLDER, _END = "suspending", ".park"


def path_of(queue: str, attempt: str, pid: int) -> str:
    """Return the path of a program's socket. `attempt` is the attempt's key, such as `17.1`."""
    return f"{queue}/{_FOLDER}/{attempt}.{pid}{_END}"


def own_path(environment: Mapping[str, str]) -> str | None:
    """Return the path of this process's socket; None if it is not part of a job of a local queue."""
    queue, job, attempt = (environment.get(f"GPUYARD_{name}", "") for name in ("QUEUE", "JOB_ID", "ATTEMPT"))
    if not (os.path.isabs(queue) and job.isdigit() and attempt.isdigit()):
        return None
    return path_of(queue, f"{job}.{attempt}", os.getpid())


def registered(queue: str, attempt: str) -> list[int]:
    """Return the processes of an attempt that have registered. Some may have ended."""
    return [pid for name, pid in _sockets(queue) if name == f"{attempt}.{pid}{_END}"]


def remove_dead(queue: str) -> None:
    """Remove the sockets of processes that have ended without doing so."""
    for name, pid in _sockets(queue):
        if not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{queue}/{_FOLDER}/{name}")


def _sockets(queue: str) -> list[tuple[str, int]]:
    """Return the names of all sockets, each with the pid in it."""
    try:
        names = sorted(os.listdir(f"{queue}/{_FOLDER}"))
    except OSError:
        return []
    pids = ((name, name.removesuffix(_END).rpartition(".")[2]) for name in names if name.endswith(_END))
    return [(name, int(pid)) for name, pid in pids if pid.isdigit()]
