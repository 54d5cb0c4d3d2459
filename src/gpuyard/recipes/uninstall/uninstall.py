"""Stop the daemon and remove the files that `find_files` lists. Refuses while gpuyard is in use.

Rules:
- Only files of this user are removed. A file or folder of another user stays, and so do the folders that contain it.
- A symbolic link is removed as a link and never followed, at any depth.
- A file system mounted inside a folder stays.
"""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from gpuyard.config import lease_dir
from gpuyard.connect import paths as daemon_places
from gpuyard.connect.daemon_lock import await_end, hold_daemon_lock
from gpuyard.connect.fast_http import DaemonConnection, NoDaemon
from gpuyard.errors import EnvironmentFault
from gpuyard.leases.ledger import Ledger
from gpuyard.recipes.uninstall.find_files import UNIT, InstalledFiles, KeptFile, find, query_queue, run_tool, unit_files

_TIMEOUT_S = 30.0
_UNFINISHED = "SELECT state, count(*) FROM jobs WHERE ended_at IS NULL GROUP BY state ORDER BY state"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Each level keeps a folder open.
_DEEPEST = 200


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
    sizes = [size for name in place.names for size in _sizes(os.path.join(place.folder, name))]
    return Size(len(sizes), sum(sizes))


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


def _sizes(path: str) -> Iterator[int]:
    try:
        found = os.lstat(path)
        if found.st_uid != os.geteuid():
            return
        if not stat.S_ISDIR(found.st_mode):
            yield found.st_size
            return
        names = os.listdir(path)
    except OSError:
        return
    for name in names:
        yield from _sizes(os.path.join(path, name))


def _remove_names(place: InstalledFiles) -> Iterator[KeptFile]:
    try:
        # A folder that is not gpuyard's own may be a symbolic link: on macOS, /tmp is.
        folder = os.open(place.folder, _FOLDER | (os.O_NOFOLLOW if place.is_own_folder else 0))
    except FileNotFoundError:
        return
    except OSError as error:
        yield KeptFile(place.folder, f"cannot be opened: {error.strerror}")
        return
    try:
        device = os.fstat(folder).st_dev
        for name in place.names:
            yield from _remove_at(folder, name, os.path.join(place.folder, name), device)
    finally:
        os.close(folder)


def _remove_at(folder: int, name: str, path: str, device: int, depth: int = 0) -> Iterator[KeptFile]:
    """Remove an entry relative to the open folder. `path` is only for messages."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if found.st_uid != os.geteuid():
            yield KeptFile(path, f"belongs to user {found.st_uid}")
        elif found.st_dev != device:
            yield KeptFile(path, "is on another file system, mounted there")
        elif not stat.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=folder)
        elif depth == _DEEPEST:
            yield KeptFile(path, f"is more than {_DEEPEST} folders deep")
        else:
            yield from _remove_tree(folder, name, path, device, depth)
    except FileNotFoundError:
        return  # already removed
    except OSError as error:
        yield KeptFile(path, f"cannot be removed: {error.strerror}")


def _remove_tree(folder: int, name: str, path: str, device: int, depth: int) -> Iterator[KeptFile]:
    inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    try:
        problems = [
            problem
            for each in os.listdir(inner)
            for problem in _remove_at(inner, each, os.path.join(path, each), device, depth + 1)
        ]
    finally:
        os.close(inner)
    yield from problems
    if not problems:
        os.rmdir(name, dir_fd=folder)
