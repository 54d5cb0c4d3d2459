"""`gpuyard uninstall`: find all files of this user's gpuyard, stop the daemon, and remove them.

Rules:
- Outside gpuyard's own folders, only what the manifest (`system/files_outside_home.py`) names is listed, and a systemd
  unit and a completion that start gpuyard. In its own folders, only names that gpuyard gives; the rest is the user's.
- Nothing is removed while jobs run or wait, or while a program of the user holds a lease.
- A symbolic link is listed and removed as a link, at any depth: its target stays.
- What belongs to another user, or is mounted inside a folder, stays, and so do the folders that contain it.
- A folder that is or contains the home folder is refused.
"""

import contextlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from gpuyard.client import paths as daemon_places
from gpuyard.client.daemon_liveness import await_end, hold_daemon_lock
from gpuyard.client.fast_http import DaemonConnection, NoDaemon
from gpuyard.config import config_dir, lease_dir
from gpuyard.engines.session.tmux import Tmux, TmuxError
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ledger.ledger import Ledger
from gpuyard.store.backup import count_unfinished
from gpuyard.system.files_outside_home import CLUSTER, LOG, MANIFEST, SNAPSHOTS, WORKSPACE, read_outside
from gpuyard.system.folder_tree import FolderTree, LeftAlone, remove_entries
from gpuyard.system.private_files import MOST_CONFIGURED
from gpuyard.system.processes import host_name, machine_name
from gpuyard.system.user_directories import named_state_directory

_UNIT = "gpuyard.service"
_TIMEOUT_S = 30.0
_SHELL_FILES = (".bashrc", ".bash_profile", ".profile", ".zshrc", ".config/fish/config.fish")
_SHARED = stat.S_IWGRP | stat.S_IWOTH
_LOG_HEAD = "# log of the workspace "

# What gpuyard creates: the folder, what its files are, their names, and how they are listed if not by the folder.
_SNAPSHOT_NAMES = r"(\.(new|removed)-)?[0-9a-f]{16}"
_JOB_FILES = (
    ("logs", "output of jobs", r"\d+\.\d+(\.err)?\.log", ""),
    ("slurm/submissions", "submissions to slurm", r"\.?[0-9a-f]{12}", ""),
    ("slurm", "the folder for slurm", "", ""),
    ("ray/submissions", "submissions to ray", r"\.?[0-9a-f]{12}", ""),
    ("ray", "the folder for ray", "", ""),
)
_DATABASE = (
    r"queue\.db(\.(damaged|before-restore|schema)-[\w-]+)?(-wal|-shm)?"
    r"|queue\.(record|host)|\.[0-9a-f]{16}\.(backup|restore)"
)
_DAEMON_FILES = (
    r"daemon\.(sock|lock|log)|web\.(token|new)|journal|name|lease-directories|neighbours-checked|file-system\..+"
    rf"|usage-history|{MANIFEST}"
)
_QUEUE_FILES = (
    *_JOB_FILES,
    ("keepers", "sockets of running jobs", r"\d+\.sock|log", ""),
    ("sessions", "sockets of workspace tasks", r".+\.sock", ""),
    ("containers", "records of containers", r"\d+\.\d+-[0-9a-f]+", ""),
    ("snapshots", "snapshots of code", _SNAPSHOT_NAMES, ""),
    ("suspending", "locks and sockets of suspended jobs", r".+\.(lock|park)", ""),
    ("simulated", "simulated GPUs in use", r".+\.share", ""),
    ("", "the queue's database", _DATABASE, "queue.*"),
    ("", "the daemon's log, lock and socket; the page's token", _DAEMON_FILES, "daemon.*, web.token"),
)


class InstalledFiles(Struct, frozen=True, kw_only=True):
    """Files of one kind in one folder. If the folder is gpuyard's own, it is removed too once it is empty."""

    what: str
    folder: str
    names: tuple[str, ...]
    shown: str
    is_own_folder: bool = True


class KeptFile(Struct, frozen=True):
    """A path that stays, and the reason."""

    path: str
    why: str


class FoundFiles(Struct, frozen=True, kw_only=True):
    places: tuple[InstalledFiles, ...]
    kept: tuple[KeptFile, ...]


class UninstallBlocker(Struct, frozen=True):
    """A reason that gpuyard's files are still in use, and how to end that."""

    text: str
    advice: str


class Size(Struct, frozen=True):
    """Number and size of the files that belong to this user."""

    files: int
    bytes: int


# Find


def find() -> FoundFiles:
    """Return all files. Changes nothing. Raises UserError if a folder of gpuyard is or contains the user's home."""
    state, config, leases = Path(daemon_places.state_folder()), config_dir(), lease_dir()
    for folder, setting in ((state, "GPUYARD_HOME"), (config, "GPUYARD_HOME"), (leases, "the lease directory")):
        _refuse_home(folder, setting)
    outside = read_outside(state) if _is_ours(state) else {}
    workspaces, named = outside.get(WORKSPACE, []), Path(named_state_directory())
    completion = _config_home() / "fish" / "completions" / "gpuyard.fish"
    # The queue's folder is last, because the manifest in it tells where other files are.
    places = [
        *(_single_file(path, "the systemd unit that runs the daemon") for path in _unit_files()),
        *(
            _single_file(path, "the completion of the fish shell")
            for path in (completion,)
            if "_GPUYARD_COMPLETE" in _text(path)
        ),
        *_workspace_logs(outside.get(LOG, [])),
        *(place for path in outside.get(CLUSTER, []) for place in _cluster_files(Path(path))),
        *(
            place
            for path in outside.get(SNAPSHOTS, [])
            for place in _files_named(Path(path), "snapshots of code", _SNAPSHOT_NAMES)
        ),
        *_lease_files(leases),
        *_files_named(config, "the configuration", r"config\.toml", "config.toml"),
        *_files_in(state, _QUEUE_FILES),
        *_named_files(named, state),
    ]
    kept = (*_kept_files(workspaces, (state, config, leases)), *_unknown_files(places))
    return FoundFiles(places=tuple(places), kept=kept)


def _unit_files() -> list[Path]:
    """Return the user's systemd unit, if it starts gpuyard, and the link that enables it."""
    units = _config_home() / "systemd" / "user"
    unit, enabled = units / _UNIT, units / "default.target.wants" / _UNIT
    if "gpuyard" not in _text(unit):
        return []
    return [path for path in (enabled, unit) if os.path.lexists(path)]


def _refuse_home(folder: Path, setting: str) -> None:
    place, home = os.path.realpath(folder), os.path.realpath(Path.home())
    if os.path.commonpath([place, home]) == place:
        raise UserError(
            f"{setting} is {folder}, which is your home folder or contains it: nothing was removed",
            hint=f"remove gpuyard's files in it by hand: {folder}/queue.*, {folder}/daemon.*, and the files that "
            "`gpuyard daemon status` names",
        )


def _cluster_files(folder: Path) -> Iterator[InstalledFiles]:
    yield from _files_in(folder, _JOB_FILES)
    yield from _files_named(folder, "this queue's folder for a cluster")


def _named_files(named: Path, state: Path) -> Iterator[InstalledFiles]:
    """Yield the outputs of batches, and what this machine left in the folder on a shared disk that the queue's folder
    stands for. Other machines may have files there."""
    if not named.is_symlink():
        yield from _files_named(named / "batches", "outputs of batches without --output-root", r".+-[0-9a-f]{8}")
    if named == state:
        return
    yield from _own_files(named / "hosts", "where your queue is", re.escape(machine_name()), machine_name())
    record = f"file-system.{host_name()}"
    yield from _own_files(named, "the result of a test", re.escape(record), record)


def _lease_files(folder: Path) -> Iterator[InstalledFiles]:
    names = r"\.?.+\.(lease|ticket|drain)|file-system\..+"
    if not _is_shared(folder):
        yield from _files_named(folder, "leases of GPUs", names)
        return
    yield from _own_files(folder, "your leases, in a directory that users share", names, "*.lease, *.ticket, *.drain")


def _workspace_logs(logs: Iterable[str]) -> Iterator[InstalledFiles]:
    """Yield LOG_DIR/train_logs/NAME.log and LOG_DIR/TASK_scheduler.log, where they begin as gpuyard's logs do."""
    by_folder: dict[str, list[str]] = {}
    for log in logs:
        if not os.path.islink(log) and _text(Path(log)).startswith(_LOG_HEAD) and _is_ours(Path(log)):
            by_folder.setdefault(os.path.dirname(log), []).append(os.path.basename(log))
    for folder, names in by_folder.items():
        is_own = os.path.basename(folder) == "train_logs"
        shown = folder if is_own else os.path.join(folder, "*_scheduler.log")
        yield InstalledFiles(
            what="logs of workspaces", folder=folder, names=tuple(names), shown=shown, is_own_folder=is_own
        )


def _kept_files(workspaces: Sequence[str], folders: Iterable[Path]) -> Iterator[KeptFile]:
    for folder in folders:
        if folder.is_symlink():
            yield KeptFile(os.path.realpath(folder), f"{folder} is a link to it: remove it by hand")
        elif folder.is_dir() and not _is_ours(folder):
            yield KeptFile(str(folder), "belongs to another user; your files in it are listed above")
    for workspace in workspaces:
        if os.path.isdir(workspace):
            yield KeptFile(workspace, "a workspace: its configs, results and markers are yours")
    if workspaces and (sessions := _open_sessions()):
        yield KeptFile("tmux", f"sessions of tasks are open: {', '.join(sessions)}; `exit` in each closes it")
    for path in (Path.home() / name for name in _SHELL_FILES):
        if "gpuyard completion" in _text(path):
            yield KeptFile(str(path), "has a line with `gpuyard completion`: remove it by hand")
    if "gpuyard" in _run_tool("crontab", "-l")[0]:
        yield KeptFile("crontab", "has a line that starts gpuyard: remove it with `crontab -e`")


def _open_sessions() -> list[str]:
    """Return the names of tmux sessions that gpuyard opened for tasks."""
    try:
        owned = Tmux(os.environ).owned_sessions("")
    except TmuxError:
        return []
    return sorted(name for names in owned.values() for name in names)


def _unknown_files(places: Iterable[InstalledFiles]) -> Iterator[KeptFile]:
    """Yield the files in gpuyard's own folders that gpuyard did not create."""
    listed: dict[str, set[str]] = {}
    for place in places:
        listed.setdefault(place.folder, set()).update(place.names)
        listed.setdefault(os.path.dirname(place.folder), set()).add(os.path.basename(place.folder))
    for folder in dict.fromkeys(place.folder for place in places if place.is_own_folder):
        for name in sorted(set(_names_in(folder)) - listed[folder]):
            yield KeptFile(os.path.join(folder, name), "not created by gpuyard")


def _files_in(folder: Path, files: Iterable[tuple[str, str, str, str]]) -> Iterator[InstalledFiles]:
    """Yield what gpuyard creates in a folder of its own, and in the folders below."""
    if folder.is_symlink():
        yield from _files_named(folder, "")
        return
    for below, what, names, shown in files:
        yield from _files_named(folder / below, what, names, shown)


def _files_named(folder: Path, what: str, names: str = "", shown: str = "") -> Iterator[InstalledFiles]:
    """Yield the matching files of a folder of this user, also if there are none; of a symbolic link only the link."""
    if folder.is_symlink():
        yield _single_file(folder, f"a link to {os.readlink(folder)}, which stays")
    elif folder.is_dir() and _is_ours(folder):
        found = tuple(name for name in _names_in(str(folder)) if re.fullmatch(names, name))
        path = str(folder / shown) if shown else str(folder)
        yield InstalledFiles(
            what=what, folder=str(folder), names=found, shown=path, is_own_folder=not _is_shared(folder)
        )


def _own_files(folder: Path, what: str, names: str, shown: str) -> Iterator[InstalledFiles]:
    """Yield the matching files that belong to this user, in a folder that other users may use too."""
    own = tuple(name for name in _names_in(str(folder)) if re.fullmatch(names, name) and _is_ours(folder / name))
    if own:
        yield InstalledFiles(what=what, folder=str(folder), names=own, shown=str(folder / shown), is_own_folder=False)


def _single_file(path: Path, what: str) -> InstalledFiles:
    return InstalledFiles(what=what, folder=str(path.parent), names=(path.name,), shown=str(path), is_own_folder=False)


def _names_in(folder: str) -> list[str]:
    """Return the entries, or none if the folder cannot be read: `remove` reports that it cannot be emptied."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _is_shared(folder: Path) -> bool:
    return folder.exists() and bool(folder.stat().st_mode & _SHARED)


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _config_home() -> Path:
    named = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(named) if os.path.isabs(named) else Path.home() / ".config"


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MOST_CONFIGURED).decode("utf-8", "replace")
    except OSError:
        return ""


def _run_tool(*command: str) -> tuple[str, str | None]:
    """Return the output and an error message or None. A program that is not installed has no output and no error."""
    if shutil.which(command[0]) is None:
        return "", None
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_TIMEOUT_S, check=False, encoding="utf-8", errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"`{' '.join(command)}` failed: {error}"
    if done.returncode:
        return "", f"`{' '.join(command)}` failed: {done.stderr.strip()}"
    return done.stdout, None


def measure(place: InstalledFiles) -> Size:
    """Return the size of the files. Folders that cannot be read count as empty."""
    own = os.geteuid()
    with contextlib.suppress(OSError), FolderTree(place.folder, follows=not place.is_own_folder) as folder:
        entries = folder.walk(lambda _: None, place.names)
        sizes = [each.status.st_size for each in entries if each.status.st_uid == own and not each.is_folder]
        return Size(len(sizes), sum(sizes))
    return Size(0, 0)


# Refuse


def find_blockers() -> list[UninstallBlocker]:
    """Return the jobs that run or wait, and the programs that hold GPUs or wait for them."""
    found = []
    state = Path(daemon_places.state_folder())
    counts = _count_unfinished(state / "queue.db") if _is_ours(state) else {}
    if counts:
        text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
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


def _count_unfinished(database: Path) -> dict[str, int]:
    try:
        return count_unfinished(database)
    except EnvironmentFault as error:
        raise EnvironmentFault(
            f"cannot read {database}, so it is unknown whether jobs run or wait: {error}",
            hint=f"check with `gpuyard queue`; if no job runs, move {database} away and try again",
        ) from error


def _refuse_while_in_use() -> None:
    blockers = find_blockers()
    if blockers:
        hint = "; ".join(each.advice for each in blockers)
        raise EnvironmentFault("nothing was removed: " + "; ".join(each.text for each in blockers), hint=hint)


# Remove


def uninstall() -> list[KeptFile]:
    """Remove everything. Return the listed files that could not be removed. Raises EnvironmentFault and removes nothing
    while jobs run or wait or a program holds a lease."""
    _refuse_while_in_use()
    has_unit = bool(_unit_files())
    problems = _systemctl("disable", "--now", _UNIT) if has_unit else []
    _stop_daemon()
    with _no_daemon():
        _refuse_while_in_use()  # a job may have been submitted meanwhile
        problems += remove(find().places)
    if has_unit:
        problems += _systemctl("daemon-reload")
    return problems


def _systemctl(*arguments: str) -> list[KeptFile]:
    """Run it for the user's units. Without systemd, the unit does not run."""
    problem = _run_tool("systemctl", "--user", *arguments)[1]
    return [] if problem is None else [KeptFile(_UNIT, problem)]


def _stop_daemon() -> None:
    try:
        with DaemonConnection(daemon_places.socket_path(), may_start=False, on_notice=lambda _: None) as daemon:
            pid = daemon.request("GET", "/status", timeout_s=_TIMEOUT_S)["pid"]
            daemon.request("POST", "/stop", body={"pid": pid, "reason": "`gpuyard uninstall`"}, timeout_s=_TIMEOUT_S)
    except NoDaemon:
        return
    await_end(daemon_places.lock_path(), pid)


def _no_daemon() -> contextlib.ExitStack:
    """Keep a daemon from starting, by holding its lock. Without a queue's folder, none can start."""
    stack = contextlib.ExitStack()
    if Path(daemon_places.state_folder()).is_dir():
        try:
            stack.enter_context(hold_daemon_lock(daemon_places.lock_path()))
        except EnvironmentFault as error:
            hint = "disable what starts it, such as a service manager, and try again"
            raise EnvironmentFault(f"nothing was removed: {error}, because it was started again", hint=hint) from error
    return stack


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
