"""Every place that holds files of this user's gpuyard, found without changing any of them.

Rules:
- In a folder only names that gpuyard gives are listed. What else is there is the user's, and stays.
- A symbolic link is listed as a link: what it points to stays.
- In a lease directory that users share only this user's leases are listed.
- Folders with configs and results (workspaces, output roots) are the user's, and stay.
- A folder that would take the home folder with it is refused.
"""

import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from gpuyard.config import config_dir, lease_dir, load_config
from gpuyard.connect import paths as daemon_places
from gpuyard.errors import UserError
from gpuyard.leases.ledger_mutex import MUTEX
from gpuyard.recipes.uninstall import systemd_and_shells
from gpuyard.recipes.uninstall.queue_records import TaskFiles, task_files

_LOG = r"\d+\.\d+\.log(\.1|\.cut)?"
_SHARED = stat.S_IWGRP | stat.S_IWOTH


class InstalledFiles(Struct, frozen=True, kw_only=True):
    """Files of one kind in one folder, which is removed as well where it is gpuyard's own and empty then."""

    what: str
    folder: str
    names: tuple[str, ...]
    shown: str
    is_own_folder: bool = True


class KeptFile(Struct, frozen=True, kw_only=True):
    """Something that `gpuyard uninstall` leaves, and why."""

    path: str
    why: str


class FoundFiles(Struct, frozen=True, kw_only=True):
    places: tuple[InstalledFiles, ...]
    stays: tuple[KeptFile, ...]


def find() -> FoundFiles:
    """UserError where a folder of gpuyard's is the user's home, or holds it."""
    state, config, leases = Path(daemon_places.state_folder()), config_dir(), lease_dir()
    for folder, setting in ((state, "GPUYARD_HOME"), (config, "GPUYARD_HOME"), (leases, "the lease directory")):
        _refuse_home(folder, setting)
    tasks = task_files(state)
    # The state folder comes last: whatever else is found out from its files can be found out until then.
    places = [
        *_unit_files(),
        *_completions(),
        *_logs_of_tasks(tasks),
        *_left_by_conda(),
        *_at_clusters(state),
        *_leases(leases),
        *_named(config, "the configuration", r"config\.toml", "config.toml"),
        *_of_queue(state),
    ]
    return FoundFiles(places=tuple(places), stays=(*_stays(tasks, (state, config, leases)), *_not_ours(places)))


def _refuse_home(folder: Path, setting: str) -> None:
    place, home = os.path.realpath(folder), os.path.realpath(Path.home())
    if os.path.commonpath([place, home]) == place:
        raise UserError(
            f"{setting} is {folder}, which is your home folder or holds it: nothing is removed there",
            hint=f"remove gpuyard's files in it by hand: {folder}/queue.db*, {folder}/daemon.*, and what `gpuyard "
            "daemon status` names",
        )


# The queue


def _of_queue(folder: Path) -> Iterator[InstalledFiles]:
    if folder.is_symlink():
        yield from _named(folder, "the queue", "", "")
        return
    yield from _handed_over(folder, "what jobs wrote")
    yield from _named(folder / "batches", "outputs of batches without --output-root", r".+-[0-9a-f]{8}", "")
    yield from _named(folder / "keepers", "sockets of running jobs", r"\d+\.sock|log", "")
    yield from _named(folder / "sessions", "sockets of workspace tasks", r".+\.sock", "")
    yield from _named(folder / "suspending", "locks of suspended jobs", r".+\.lock", "")
    yield from _named(folder / "simulated", "simulated GPUs in use", r"lock|.+\.share", "")
    yield from _named(folder, "the queue's database", r"queue\.db(\.damaged-[\w-]+)?(-wal|-shm)?", "queue.db*")
    own = r"daemon\.(sock|lock|log)|web\.(token|new)|journal|name"
    yield from _named(folder, "the daemon's log, lock and socket; the page's token", own, "daemon.*, web.token")


def _at_clusters(state: Path) -> Iterator[InstalledFiles]:
    """Folders that nodes see, where the configuration names one: the queue has its own in there."""
    try:
        name = (state / "name").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    if re.fullmatch(r"queue-[0-9a-f]{8}", name) is None:
        return
    config = load_config()
    for told in dict.fromkeys(each.folder for each in (config.slurm, config.ray) if each.folder is not None):
        folder = Path(told).expanduser() / name
        yield from _handed_over(folder, "what jobs at a cluster wrote")
        yield from _named(folder, "this queue's folder for a cluster", "", "")


def _handed_over(folder: Path, logs: str) -> Iterator[InstalledFiles]:
    yield from _named(folder / "logs", logs, _LOG, "")
    for site in ("slurm", "ray"):
        yield from _named(folder / site / "parcels", f"jobs that were handed to {site}", r"\.?[0-9a-f]{12}", "")
        yield from _named(folder / site, f"the folder for {site}", "", "")


def _leases(folder: Path) -> Iterator[InstalledFiles]:
    names = r"\.?.+\.(lease|ticket)"
    try:
        is_shared = bool(folder.stat().st_mode & _SHARED)
    except OSError:
        return
    if not is_shared:
        yield from _named(folder, "leases of GPUs", f"{names}|{re.escape(MUTEX)}", "")
        return
    # Its mutex is everybody's: with another file of that name, two could hold it at once.
    yield from _own_in(folder, "your leases, in a directory that users share", names, "*.lease, *.ticket")


# Elsewhere


def _unit_files() -> Iterator[InstalledFiles]:
    return (_single(path, "the systemd unit that runs the daemon") for path in systemd_and_shells.unit_files())


def _completions() -> Iterator[InstalledFiles]:
    return (_single(path, "the completion of the fish shell") for path in systemd_and_shells.completion_files())


def _logs_of_tasks(tasks: Iterable[TaskFiles]) -> Iterator[InstalledFiles]:
    """Logs outside of workspaces: LOG_DIR/train_logs/NAME.log and LOG_DIR/TASK_scheduler.log."""
    by_folder: dict[str, dict[str, None]] = {}
    for task in tasks:
        for log in task.logs:
            is_outside = os.path.commonpath([log, task.workspace]) != task.workspace
            if is_outside and os.path.isfile(log) and not os.path.islink(log) and _is_ours(Path(log)):
                folder, name = os.path.split(log)
                by_folder.setdefault(folder, {})[name] = None
    for folder, names in by_folder.items():
        is_own = os.path.basename(folder) == "train_logs"
        shown = folder if is_own else os.path.join(folder, "*_scheduler.log")
        yield InstalledFiles(
            what="logs of workspaces", folder=folder, names=tuple(names), shown=shown, is_own_folder=is_own
        )


def _left_by_conda() -> Iterator[InstalledFiles]:
    """Folders of a `workspace start` that was killed while it activated an environment."""
    what, names = "left by an interrupted `workspace start`", r"gpuyard-conda-\w+"
    yield from _own_in(Path(tempfile.gettempdir()), what, names, "gpuyard-conda-*")


def _stays(tasks: Iterable[TaskFiles], folders: Iterable[Path]) -> Iterator[KeptFile]:
    for folder in folders:
        if folder.is_symlink():
            yield KeptFile(path=os.path.realpath(folder), why=f"{folder} is a link to it: remove it by hand")
        elif folder.is_dir() and not _is_ours(folder):
            yield KeptFile(path=str(folder), why="belongs to another user; what is yours in it is listed above")
    for workspace in dict.fromkeys(task.workspace for task in tasks):
        if os.path.isdir(workspace):
            yield KeptFile(path=workspace, why="a workspace: its configs, results and markers are yours")
    if any(True for _ in tasks) and (sessions := systemd_and_shells.open_sessions()):
        yield KeptFile(path="tmux", why=f"sessions of tasks are open: {', '.join(sessions)}; `exit` in each closes it")
    for path, why in systemd_and_shells.lines_to_remove():
        yield KeptFile(path=path, why=why)


def _not_ours(places: Iterable[InstalledFiles]) -> Iterator[KeptFile]:
    """What is in gpuyard's own folders and is not gpuyard's."""
    listed: dict[str, set[str]] = {}
    for place in places:
        listed.setdefault(place.folder, set()).update(place.names)
        listed.setdefault(os.path.dirname(place.folder), set()).add(os.path.basename(place.folder))
    for folder in dict.fromkeys(place.folder for place in places if place.is_own_folder):
        for name in sorted(set(_names_in(folder)) - listed[folder]):
            yield KeptFile(path=os.path.join(folder, name), why="not made by gpuyard")


def _named(folder: Path, what: str, pattern: str, shown: str) -> Iterator[InstalledFiles]:
    """What has such a name in a folder of this user's, even where that is nothing; of a link, the link alone."""
    if folder.is_symlink():
        yield _single(folder, f"a link to {os.readlink(folder)}, which stays")
    elif folder.is_dir() and _is_ours(folder):
        names = tuple(name for name in _names_in(str(folder)) if re.fullmatch(pattern, name))
        is_own = not folder.stat().st_mode & _SHARED
        path = str(folder / shown) if shown else str(folder)
        yield InstalledFiles(what=what, folder=str(folder), names=names, shown=path, is_own_folder=is_own)


def _own_in(folder: Path, what: str, pattern: str, shown: str) -> Iterator[InstalledFiles]:
    """What has such a name and is this user's, in a folder that others may use too."""
    own = tuple(name for name in _names_in(str(folder)) if re.fullmatch(pattern, name) and _is_ours(folder / name))
    if own:
        yield InstalledFiles(what=what, folder=str(folder), names=own, shown=str(folder / shown), is_own_folder=False)


def _names_in(folder: str) -> list[str]:
    """None where it cannot be read: then it cannot be emptied either, and is told of when it is to be removed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _single(path: Path, what: str) -> InstalledFiles:
    return InstalledFiles(what=what, folder=str(path.parent), names=(path.name,), shown=str(path), is_own_folder=False)


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False
