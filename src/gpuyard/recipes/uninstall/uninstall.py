"""Stop the daemon and remove the files that `find_files` lists. Refuses while gpuyard is in use.

Rules:
- Only files of this user are removed. A file or folder of another user stays, and so do the folders that contain it.
- A symbolic link is removed as a link and never followed, at any depth.
- What is mounted inside a folder stays, and so do the folders that contain it.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from gpuyard.config import lease_dir
from gpuyard.connect import paths as daemon_places
from gpuyard.connect.daemon_lock import await_end, hold_daemon_lock
from gpuyard.connect.fast_http import DaemonConnection, NoDaemon
from gpuyard.errors import EnvironmentFault
from gpuyard.leases.ledger import Ledger
from gpuyard.recipes.uninstall.find_files import UNIT, InstalledFiles, KeptFile, find, query_queue, run_tool, unit_files
from gpuyard.system.folder_tree import FolderTree, LeftAlone, remove_entries

_TIMEOUT_S = 30.0
_UNFINISHED = "SELECT state, count(*) FROM jobs WHERE ended_at IS NULL GROUP BY state ORDER BY state"


class UninstallBlocker(Struct, frozen=True):
    """A reason that gpuyard's files are still in use, and how to end that."""

    text: str
    advice: str


def find_blockers() -> list[UninstallBlocker]:
    """Return the jobs that run or wait, and the programs that hold GPUs or wait for them."""
    found = []
    counts = query_queue(Path(daemon_places.state_folder()), _UNFINISHED)
    if counts:
        text = ", ".join(f"{count} {state}" for state, count in counts)
        advice = "wait for them, or end them with `gpuyard cancel all` and then `gpuyard wait all`"
        found.append(UninstallBlocker(f"jobs run or wait ({text})", advice))
    folder = lease_dir()
    holders = []
    if folder.is_dir() and os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        ledger = Ledger(folder)
        holders = [*(lease.holder for lease in ledger.leases()), *(ticket.holder for ticket in ledger.tickets())]
    own = [holder.pid for holder in holders if holder.uid == os.geteuid()]
    if own:
        pids = ", ".join(map(str, own[:5])) + (" and more" if len(own) > 5 else "")
        text = f"your programs hold GPUs or wait for them (pid {pids})"
        found.append(UninstallBlocker(text, "end them first; `gpuyard leases` shows them"))
    return found


def uninstall() -> list[KeptFile]:
    """Remove everything. Return the listed files that could not be removed. Raises EnvironmentFault and removes nothing
    while jobs run or wait or a program holds a lease."""
    _refuse_while_in_use()
    has_unit = bool(unit_files())
    problems = _systemctl("disable", "--now", UNIT) if has_unit else []
    _stop_daemon()
    with _no_daemon():
        _refuse_while_in_use()  # a job may have been submitted meanwhile
        problems += remove(find().places)
    if has_unit:
        problems += _systemctl("daemon-reload")
    return problems


def _systemctl(*arguments: str) -> list[KeptFile]:
    """Run it for the user's units. Without systemd, the unit does not run."""
    problem = run_tool("systemctl", "--user", *arguments)[1]
    return [] if problem is None else [KeptFile(UNIT, problem)]


def _refuse_while_in_use() -> None:
    blockers = find_blockers()
    if blockers:
        hint = "; ".join(each.advice for each in blockers)
        raise EnvironmentFault("nothing was removed: " + "; ".join(each.text for each in blockers), hint=hint)


def _stop_daemon() -> None:
    try:
        with DaemonConnection(daemon_places.socket_path(), may_start=False, on_notice=lambda _: None) as daemon:
            pid = daemon.request("GET", "/status", timeout_s=_TIMEOUT_S)["pid"]
            daemon.request("POST", "/stop", body={"pid": pid, "reason": "`gpuyard uninstall`"}, timeout_s=_TIMEOUT_S)
    except NoDaemon:
        return
    await_end(daemon_places.lock_path(), pid)


def _no_daemon() -> contextlib.ExitStack:
    """Keep a daemon from starting, by holding its lock. Without a state folder, none can start."""
    stack = contextlib.ExitStack()
    if Path(daemon_places.state_folder()).is_dir():
        try:
            stack.enter_context(hold_daemon_lock(daemon_places.lock_path()))
        except EnvironmentFault as error:
            hint = "disable what starts it, such as a service manager, and try again"
            raise EnvironmentFault(f"nothing was removed: {error}, because it was started again", hint=hint) from error
    return stack


class Size(Struct, frozen=True):
    """Number and size of the files that belong to this user."""

    files: int
    bytes: int


def measure(place: InstalledFiles) -> Size:
    """Return the size of the files. Folders that cannot be read count as empty."""
    own = os.geteuid()
    with contextlib.suppress(OSError), FolderTree(place.folder, follows=not place.is_own_folder) as folder:
        entries = folder.walk(lambda _: None, place.names)
        sizes = [each.status.st_size for each in entries if each.status.st_uid == own and not each.is_folder]
        return Size(len(sizes), sum(sizes))
    return Size(0, 0)


def remove(places: Iterable[InstalledFiles]) -> list[KeptFile]:
    """Remove the files, then gpuyard's own folders that are empty. Return what could not be removed."""
    places = tuple(places)
    problems = [problem for place in places for problem in _remove_names(place)]
    own = {place.folder for place in places if place.is_own_folder}
    for folder in sorted(own, key=len, reverse=True):
        try:
            if not os.listdir(folder):
                os.rmdir(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(KeptFile(folder, f"cannot be removed: {error.strerror}"))
    return problems


def _remove_names(place: InstalledFiles) -> list[KeptFile]:
    try:
        # A folder that is not gpuyard's own may be a symbolic link: on macOS, /tmp is.
        with FolderTree(place.folder, follows=not place.is_own_folder) as folder:
            problems = remove_entries(folder, place.names, keeps_others=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [KeptFile(place.folder, f"cannot be opened: {error.strerror}")]
    return [
        KeptFile(each.filename, f"{'' if isinstance(each, LeftAlone) else 'cannot be removed: '}{each.strerror}")
        for each in problems
    ]
