"""Which faults a run does, in which order and how long: the same for the same seed, on any machine."""

import errno
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from msgspec import Struct

from tests.torture import faults, file_faults
from tests.torture.faults import Fault
from tests.torture.inject import Call
from tests.torture.target import Target

_IO = Call.WRITE | Call.SYNC

# The class first, so that it can be asked what it needs and how long it lasts.
TABLE: dict[str, tuple[type[Fault], Callable[[Target, float], Fault]]] = {}


def _add(name: str, kind: type[Fault], *arguments: object, **named: object) -> None:
    TABLE[name] = (kind, partial(_make, kind, arguments, named))


def _make(
    kind: type[Fault], arguments: tuple[object, ...], named: dict[str, object], target: Target, pick: float
) -> Fault:
    return kind(target, pick, *arguments, **named)


_add("kill daemon", faults.Kill, "daemon")
_add("kill keeper", faults.Kill, "keeper")
_add("kill daemon and keeper", faults.Kill, "daemon", "keeper")
_add("kill job", faults.Kill, "job")
_add("kill script", faults.Kill, "script")
_add("terminate daemon", faults.Kill, "daemon", signum=signal.SIGTERM)
_add("restart daemon", faults.Restart)
_add("stop daemon", faults.Stop, "daemon")
_add("stop keeper", faults.Stop, "keeper")
_add("stop job", faults.Stop, "job")
_add("stop script", faults.Stop, "script")
_add("stop mutex holder", faults.StopMutexHolder)
for _which in ("nofile", "fsize"):
    _add(f"limit {_which} of keeper", faults.Limit, "keeper", _which)
for _which in ("nofile", "fsize", "as"):
    _add(f"limit {_which} of daemon", faults.Limit, "daemon", _which)
for _role in ("daemon", "keeper"):
    _add(f"no processes for {_role}", faults.Inject, _role, Call.SPAWN, errno.EAGAIN, errno.ENOMEM)
    _add(f"I/O errors in {_role}", faults.Inject, _role, _IO, errno.EIO, errno.ENOSPC, errno.EDQUOT)
_add("clock forward", faults.StepClock, +1)
_add("clock back", faults.StepClock, -1)
_add("suspend machine", faults.Suspend)
for _folder in ("home", "logs", "ledger"):
    _add(f"fill {_folder}", faults.FillDisk, _folder)
    _add(f"use up inodes of {_folder}", faults.UseUpInodes, _folder)
_add("remove leases of the queue", file_faults.RemoveQueueLeases)
_add("remove tickets", file_faults.RemoveTickets)
_add("remove socket", file_faults.RemoveFiles, names=("daemon.sock",))
_add("remove daemon.lock", file_faults.RemoveFiles, names=("daemon.lock",))
_add("remove socket and daemon.lock", file_faults.RemoveFiles, names=("daemon.sock", "daemon.lock"))
_add("remove finished logs", file_faults.RemoveFinishedLogs)
_add("garbage in the ledger", file_faults.GarbageRecords)


# Faults that may come while another one lasts, and how often one does.
_MEANWHILE = ("kill daemon", "kill keeper", "kill daemon and keeper", "terminate daemon", "kill job")
_OFTEN = 0.3


class PlannedFault(Struct, frozen=True, kw_only=True):
    """`meanwhile` is a fault in the middle of this one."""

    name: str
    pick: float
    lasts_s: float
    pause_s: float  # after it
    meanwhile: str | None = None


def planned_faults(seed: int, chosen: Iterable[str] = tuple(TABLE)) -> Iterator[PlannedFault]:
    """Yield faults for ever: all of them in a random order, then all again in another."""
    dice = random.Random(f"faults {seed}")
    names = list(chosen)
    while True:
        dice.shuffle(names)
        for name in names:
            shortest, longest = TABLE[name][0].lasts
            meanwhile, is_double = dice.choice(_MEANWHILE), dice.random() < _OFTEN
            yield PlannedFault(
                name=name,
                pick=dice.random(),
                lasts_s=dice.uniform(shortest, longest),
                pause_s=dice.uniform(0.5, 3.0),
                meanwhile=meanwhile if is_double and longest and meanwhile in names else None,
            )


def left_out(name: str, target: Target) -> str | None:
    """Return why a fault cannot be done here."""
    kind = TABLE[name][0]
    if kind.needs_mounts and not target.is_mounted:
        return "no mounts of its own: it needs root and `unshare`"
    if kind.needs_injector and target.injector is None:
        return "no C compiler (cc)"
    return None
