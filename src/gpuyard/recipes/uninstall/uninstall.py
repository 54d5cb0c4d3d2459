"""Stops the daemon and removes what `places` found; refuses while anything still uses it."""

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

_ANSWER_S = 30.0


class UninstallBlocker(Struct, frozen=True):
    """Who still uses gpuyard's files, and what ends that."""

    text: str
    advice: str


def hindrances() -> list[UninstallBlocker]:
    """Return why nothing can be removed now: jobs that run or wait, programs that hold GPUs or wait for them."""
    return [*_jobs(), *_holders()]


def uninstall() -> list[RemovalProblem]:
    """Remove everything. Return what stayed though it was listed.

    EnvironmentFault, and nothing is removed, while jobs run or wait or a program holds a lease.
    """
    _refuse_while_in_use()
    problems = []
    has_unit = bool(systemd_and_shells.unit_files())
    if has_unit and (problem := systemd_and_shells.stop_unit()) is not None:
        problems.append(RemovalProblem(systemd_and_shells.UNIT, problem))
    _stop_daemon()
    with _no_daemon():
        _refuse_while_in_use()  # a job may have come meanwhile
        problems += remove(find().places)
    if has_unit and (problem := systemd_and_shells.reload_units()) is not None:
        problems.append(RemovalProblem(systemd_and_shells.UNIT, problem))
    return problems


def _refuse_while_in_use() -> None:
    found = hindrances()
    if found:
        raise EnvironmentFault(
            "nothing is removed: " + "; ".join(each.text for each in found),
            hint="; ".join(each.advice for each in found),
        )


def _jobs() -> Iterator[UninstallBlocker]:
    counts = unfinished_jobs(Path(daemon_places.state_folder()))
    if counts:
        told = ", ".join(f"{count} {state}" for state, count in counts.items())
        yield UninstallBlocker(
            f"jobs run or wait ({told})", "`gpuyard cancel all` and then `gpuyard wait` end them, or wait for them"
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
            f"programs of yours hold GPUs or wait for them (pid {pids})", "`gpuyard leases` shows them: end them first"
        )


def _stop_daemon() -> None:
    try:
        with DaemonConnection(daemon_places.socket_path(), may_start=False, tell=lambda _: None) as daemon:
            pid = daemon.request("GET", "/status", timeout_s=_ANSWER_S)["pid"]
            daemon.request("POST", "/stop", body={"pid": pid, "reason": "`gpuyard uninstall`"}, timeout_s=_ANSWER_S)
    except NoDaemon:
        return
    await_end(daemon_places.lock_path(), pid)


@contextlib.contextmanager
def _no_daemon() -> Iterator[None]:
    """Keeps any from starting; there is none to keep out where there is no folder for it."""
    if not Path(daemon_places.state_folder()).is_dir():
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_daemon_lock(daemon_places.lock_path()))
        except EnvironmentFault as error:
            raise EnvironmentFault(
                f"nothing is removed: {error}, as it was started again",
                hint="stop it where it is started, such as at its service manager, and try again",
            ) from error
        yield
