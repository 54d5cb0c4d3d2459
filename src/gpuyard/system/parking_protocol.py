"""Where programs listen that can park their GPU memory themselves, and what is said there.

A process that can move its GPU memory to RAM by itself listens on a unix socket in the folder of its queue; that the
socket exists is its registration. Its name says how many processes of the job wait for each other within a step (the
`world_size`). The process that suspends a job looks for the sockets (`registered`) and connects to each:

| request | answer, once that is so |
| --- | --- |
| `hold` | `next N`: its next point is number N, and it will not leave that point before it is asked for more |
| `park N` | `parked BYTES`: it waits at point N, and has moved so many bytes of GPU memory to RAM |
| `return` | `returned`: its GPU memory is back, also if it had not parked. It still waits at its point |
| `keep` | none; what was asked before stays so. A program that has returned goes on |
| any | `refused WHY`: it cannot |

- A point is the end of a step of the program; each process counts its points.
- If a connection is closed before `keep`, the process goes back to what it did before: it goes on, or parks again.
- So all processes of a job park, or none: they are held, and agree on the largest of their next points. None of them
  has passed it, and each can reach it, since none waits there for what another does after its own.
- Both sides check that the other is a process of the same user (`user_sockets`)."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

HOLD, PARK, RETURN, KEEP = b"hold", b"park", b"return", b"keep"
NEXT, PARKED, RETURNED, REFUSED = "next", "parked", "returned", "refused"
LONGEST_LINE = 4096
_FOLDER, _END = "suspending", ".park"


class Registration(NamedTuple):
    """A process that can park. `world_size` is 1 if it waits for no other."""

    path: str
    pid: int
    world_size: int


def path_of(queue: str, attempt: str, pid: int, world_size: int) -> str:
    """Return the path of a process's socket. `attempt` is the attempt's key, such as `17.1`."""
    return f"{queue}/{_FOLDER}/{attempt}.{pid}.{world_size}{_END}"


def own_attempt(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the queue and the attempt of this process; None if it is not part of a job of a local queue."""
    queue, job, attempt = (environment.get(f"GPUYARD_{name}", "") for name in ("QUEUE", "JOB_ID", "ATTEMPT"))
    if not (os.path.isabs(queue) and job.isdecimal() and attempt.isdecimal()):
        return None
    return queue, f"{job}.{attempt}"


def registered(queue: str, attempt: str) -> list[Registration]:
    """Return the processes of an attempt that have registered, and have not ended."""
    return [each for each in _sockets(queue, f"{attempt}.") if os.path.exists(f"/proc/{each.pid}")]


def why_incomplete(registrations: Sequence[Registration]) -> str | None:
    """Return why these processes cannot park together, or None: all that wait for each other have to be there."""
    sizes = [each.world_size for each in registrations if each.world_size > 1]
    if not sizes or set(sizes) == {len(sizes)}:
        return None
    return f"{len(sizes)} of its {max(sizes)} processes have called gpuyard.torch.parkable and ended a step"


def remove_dead(queue: str) -> None:
    """Remove the sockets of processes that have ended without doing so."""
    for each in _sockets(queue):
        if not os.path.exists(f"/proc/{each.pid}"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(each.path)


def _sockets(queue: str, prefix: str = "") -> list[Registration]:
    try:
        names = sorted(os.listdir(f"{queue}/{_FOLDER}"))
    except OSError:
        return []
    found = []
    for name in names:
        parts = name.removesuffix(_END).split(".")
        if name.startswith(prefix) and name.endswith(_END) and len(parts) == 4 and all(map(str.isdecimal, parts)):
            found.append(Registration(f"{queue}/{_FOLDER}/{name}", int(parts[2]), int(parts[3])))
    return found
