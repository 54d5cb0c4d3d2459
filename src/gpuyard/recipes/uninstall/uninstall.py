"""Stop the daemon and remove the files that `find_files` lists. Refuses while gpuyard is in use."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from gpuyard.config import lease_dir
from gpuyard.connect import paths as daemon_places
from gpuyard.connect.daemon_lock import await_end, hold_daemon_lock
from gpuyard.connect.fast_http import DaemonConnection, NoDaemon
from gpuyard.errors import EnvironmentFault
from gpuyard.leases.ledger import Ledger
from gpuyard.recipes.uninstall import systemd_and_shells
from gpuyard.recipes.uninstall.find_files import find
from gpuyard.recipes.uninstall.queue_records import unfinished_jobs
from gpuyard.recipes.uninstall.remove_files import RemovalProblem, remove

_TIMEOUT_S = 30.0


class UninstallBlocker(Struct, frozen=True):
    """A reason that gpuyard's files are still in use, and how to end that."""

    text: str
    advice: str


def find_blockers() -> list[UninstallBlocker]:
    """Return the jobs that run or wait, and the programs that hold GPUs or wait for them."""
    return [*_jobs(), *_holders()]


def uninstall() -> list[RemovalProblem]:
    """Remove everything. Return the listed files that could not be removed.

    Raises EnvironmentFault and removes nothing while jobs run or wait or a program holds a lease.
    """
    _refuse_while_in_use()
    problems = []
    has_unit = bool(systemd_and_shells.unit_files())
    if has_unit and (problem := systemd_and_shells.stop_unit()) is not None:
        problems.append(RemovalProblem(systemd_and_shells.UNIT, problem))
    _stop_daemon()
    with _no_daemon():
        _refuse_while_in_use()  # a job may have been submitted meanwhile
        problems += remove(find().places)
    if has_unit and (problem := systemd_and_shells.reload_units()) is not None:
        problems.append(RemovalProblem(systemd_and_shells.UNIT, problem))
    return problems


def _refuse_while_in_use() -> None:
    blockers = find_blockers()
    if blockers:
        raise EnvironmentFault(
            "nothing was removed: " + "; ".join(each.text for each in blockers),
            hint="; ".join(each.advice for each in blockers),
        )


def _jobs() -> Iterator[UninstallBlocker]:
    counts = unfinished_jobs(Path(daemon_places.state_folder()))
    if counts:
        text = ", ".join(f"{count} {state}" for state, count in counts.items())
        yield UninstallBlocker(
            f"jobs run or wait ({text})", "wait for them, or end them with `gpuyard cancel all` and then `gpuyard wait`"
        )


def _holders() -> Iterator[UninstallBlocker]:
    folder = lease_dir()
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return
    ledger = Ledger(folder)
    holders = [*(lease.holder for lease in ledger.leases()), *(ticket.holder for ticket in ledger.tickets())]
    own = [holder.pid for holder in holders if holder.uid == os.geteuid()]
    if own:
        pids = ", ".join(map(str, own[:5])) + (" and more" if len(own) > 5 else "")
        yield UninstallBlocker(
            f"your programs hold GPUs or wait for them (pid {pids})", "end them first; `gpuyard leases` shows them"
        )


def _stop_daemon() -> None:
    try:
        with DaemonConnection(daemon_places.socket_path(), may_start=False, tell=lambda _: None) as daemon:
            pid = daemon.request("GET", "/status", timeout_s=_TIMEOUT_S)["pid"]
            daemon.request("POST", "/stop", body={"pid": pid, "reason": "`gpuyard uninstall`"}, timeout_s=_TIMEOUT_S)
    except NoDaemon:
        return
    await_end(daemon_places.lock_path(), pid)


@contextlib.contextmanager
def _no_daemon() -> Iterator[None]:
    """Keep a daemon from starting, by holding its lock. Without a state folder, none can start."""
    if not Path(daemon_places.state_folder()).is_dir():
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_daemon_lock(daemon_places.lock_path()))
        except EnvironmentFault as error:
            raise EnvironmentFault(
                f"nothing was removed: {error}, because it was started again",
                hint="disable what starts it, such as a service manager, and try again",
            ) from error
        yield
