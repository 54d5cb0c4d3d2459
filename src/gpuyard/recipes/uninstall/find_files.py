"""Find all files of this user's gpuyard. Changes nothing.

Rules:
- Only names that gpuyard gives are listed. Other files in the same folder are the user's, and stay.
- A symbolic link is listed as a link: its target stays.
- In a lease directory that users share, only this user's leases are listed.
- Folders with configs and results (workspaces, output roots) are the user's, and stay.
- Nothing is listed if the queue's database belongs to another user.
- A folder that is or contains the home folder is refused.
"""

import contextlib
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.config import config_dir, lease_dir, load_config
from gpuyard.connect import paths as daemon_places
from gpuyard.engines.session.tmux import Tmux, TmuxError
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.store.database import open_reader
from gpuyard.system.file_locks import try_lock
from gpuyard.system.machine_identity import host_name, machine_name
from gpuyard.system.user_directories import named_state_directory, shared_directory

UNIT = "gpuyard.service"
_TIMEOUT_S = 30.0
_MOST_BYTES = 1 << 20
_SHELL_FILES = (".bashrc", ".bash_profile", ".profile", ".zshrc", ".config/fish/config.fish")
_TASKS = """
SELECT DISTINCT
    json_extract(body, '$.task.workspace'), json_extract(body, '$.task.log'),
    json_extract(body, '$.task.other_log'), json_extract(body, '$.task.scheduler_log')
FROM specs WHERE json_extract(body, '$.task.workspace') IS NOT NULL
"""
_LOG = r"\d+\.\d+(\.err)?\.log"
_SHARED = stat.S_IWGRP | stat.S_IWOTH


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


def find() -> FoundFiles:
    """Return all files. Raises UserError if a folder of gpuyard is or contains the user's home folder."""
    state, config, leases = Path(daemon_places.state_folder()), config_dir(), lease_dir()
    for folder, setting in ((state, "GPUYARD_HOME"), (config, "GPUYARD_HOME"), (leases, "the lease directory")):
        _refuse_home(folder, setting)
    tasks, temporary = _find_tasks(state), Path(tempfile.gettempdir())
    completion = _config_home() / "fish" / "completions" / "gpuyard.fish"
    completions = [completion] if "_GPUYARD_COMPLETE" in _text(completion) else []
    # The state folder is last, because files in it tell where other files are.
    places = [
        *(_single_file(path, "the systemd unit that runs the daemon") for path in unit_files()),
        *(_single_file(path, "the completion of the fish shell") for path in completions),
        *_task_logs(tasks),
        *_interrupted_activations(temporary),
        *_cluster_files(state),
        *_lease_files(leases),
        *_files_named(config, "the configuration", r"config\.toml", "config.toml"),
        *_queue_files(state),
        *_shared_files(state),
    ]
    kept = (*_kept_files(tasks, (state, config, leases)), *_unknown_files(places))
    return FoundFiles(places=tuple(places), kept=kept)


def unit_files() -> list[Path]:
    """Return the user's systemd unit, if it starts gpuyard, and the link that enables it."""
    units = _config_home() / "systemd" / "user"
    unit, enabled = units / UNIT, units / "default.target.wants" / UNIT
    if "gpuyard" not in _text(unit):
        return []
    return [path for path in (enabled, unit) if os.path.lexists(path)]


def run_tool(*command: str) -> tuple[str, str | None]:
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


def query_queue(state: Path, query: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query to the queue's database, which is not written; none if there is no database."""
    path = state / "queue.db"
    if not (_is_ours(state) and path.is_file()):
        return []  # nothing in a folder of another user is listed
    for each in (path, *(state / f"queue.db{suffix}" for suffix in ("-wal", "-shm"))):
        if os.path.lexists(each) and not _is_ours(each):
            raise EnvironmentFault(
                f"{each} belongs to another user, and could name files of yours as logs: nothing was removed",
                hint=f"remove {each}, and try again",
            )
    try:
        with contextlib.closing(open_reader(path)) as database:
            return database.execute(query).fetchall()
    except (sqlite3.DatabaseError, EnvironmentFault) as error:
        raise EnvironmentFault(
            f"cannot read {path}, so it is unknown whether jobs run or wait: {error}",
            hint=f"check with `gpuyard queue`; if no job runs, move {path} away and try again",
        ) from error


def _find_tasks(state: Path) -> dict[str, list[str]]:
    """Return the log files of the queue's tasks by workspace, all as absolute paths."""
    tasks: dict[str, list[str]] = {}
    for workspace, *logs in query_queue(state, _TASKS):
        if os.path.isabs(workspace):
            tasks.setdefault(workspace, []).extend(log for log in logs if log and os.path.isabs(log))
    return tasks


def _refuse_home(folder: Path, setting: str) -> None:
    place, home = os.path.realpath(folder), os.path.realpath(Path.home())
    if os.path.commonpath([place, home]) == place:
        raise UserError(
            f"{setting} is {folder}, which is your home folder or contains it: nothing was removed",
            hint=f"remove gpuyard's files in it by hand: {folder}/queue.*, {folder}/daemon.*, and the files that "
            "`gpuyard daemon status` names",
        )


def _queue_files(folder: Path) -> Iterator[InstalledFiles]:
    if folder.is_symlink():
        yield from _files_named(folder, "the queue")
        return
    yield from _job_files(folder, "output of jobs")
    batches = Path(named_state_directory()) / "batches"
    yield from _files_named(batches, "outputs of batches without --output-root", r".+-[0-9a-f]{8}")
    yield from _files_named(folder / "keepers", "sockets of running jobs", r"\d+\.sock|log")
    yield from _files_named(folder / "sessions", "sockets of workspace tasks", r".+\.sock")
    yield from _files_named(folder / "containers", "records of containers", r"\d+\.\d+-[0-9a-f]+")
    snapshots = Path(load_config().submit.snapshot_folder or folder / "snapshots").expanduser()
    yield from _files_named(snapshots, "snapshots of code", r"(\.(new|removed)-)?[0-9a-f]{16}")
    yield from _files_named(folder / "suspending", "locks and sockets of suspended jobs", r".+\.(lock|park)")
    yield from _files_named(folder / "simulated", "simulated GPUs in use", r".+\.share")
    aside = r"\.(damaged|before-restore|schema)-[\w-]+"
    database = rf"queue\.db({aside})?(-wal|-shm)?|queue\.(record|host)|\.[0-9a-f]{{16}}\.(backup|restore)"
    yield from _files_named(folder, "the queue's database", database, "queue.*")
    own = r"daemon\.(sock|lock|log)|web\.(token|new)|journal|name|lease-directories|neighbours-checked|file-system\..+"
    own = rf"{own}|batch-sizes\.json|usage-history"
    yield from _files_named(folder, "the daemon's log, lock and socket; the page's token", own, "daemon.*, web.token")


def _shared_files(state: Path) -> Iterator[InstalledFiles]:
    """Yield what this machine left in the folder on a shared disk that the state folder stands for. Other machines may
    have files there."""
    named = Path(named_state_directory())
    if named != state:
        yield from _own_files(named / "hosts", "where your queue is", re.escape(machine_name()), machine_name())
        record = f"file-system.{host_name()}"
        yield from _own_files(named, "the result of a test", re.escape(record), record)


def _cluster_files(state: Path) -> Iterator[InstalledFiles]:
    """Yield this queue's files in the folders for cluster nodes that the configuration names."""
    try:
        name = (state / "name").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    if re.fullmatch(r"queue-[0-9a-f]{8}", name) is None:
        return
    config = load_config()
    for configured in dict.fromkeys(each.folder or shared_directory() for each in (config.slurm, config.ray)):
        if configured is None or configured == str(state):
            continue
        folder = Path(configured).expanduser() / name
        yield from _job_files(folder, "output of jobs at a cluster")
        yield from _files_named(folder, "this queue's folder for a cluster")


def _job_files(folder: Path, logs: str) -> Iterator[InstalledFiles]:
    yield from _files_named(folder / "logs", logs, _LOG)
    for site in ("slurm", "ray"):
        yield from _files_named(folder / site / "submissions", f"submissions to {site}", r"\.?[0-9a-f]{12}")
        yield from _files_named(folder / site, f"the folder for {site}")


def _lease_files(folder: Path) -> Iterator[InstalledFiles]:
    names = r"\.?.+\.(lease|ticket|drain)|file-system\..+"
    try:
        is_shared = bool(folder.stat().st_mode & _SHARED)
    except OSError:
        return
    if not is_shared:
        yield from _files_named(folder, "leases of GPUs", names)
        return
    yield from _own_files(folder, "your leases, in a directory that users share", names, "*.lease, *.ticket, *.drain")


def _task_logs(tasks: Mapping[str, list[str]]) -> Iterator[InstalledFiles]:
    """Yield logs outside workspaces: LOG_DIR/train_logs/NAME.log and LOG_DIR/TASK_scheduler.log."""
    by_folder: dict[str, dict[str, None]] = {}
    for workspace, logs in tasks.items():
        for log in logs:
            is_outside = os.path.commonpath([log, workspace]) != workspace
            if is_outside and os.path.isfile(log) and not os.path.islink(log) and _is_ours(Path(log)):
                folder, name = os.path.split(log)
                by_folder.setdefault(folder, {})[name] = None
    for folder, names in by_folder.items():
        is_own = os.path.basename(folder) == "train_logs"
        shown = folder if is_own else os.path.join(folder, "*_scheduler.log")
        yield InstalledFiles(
            what="logs of workspaces", folder=folder, names=tuple(names), shown=shown, is_own_folder=is_own
        )


def _kept_files(tasks: Iterable[str], folders: Iterable[Path]) -> Iterator[KeptFile]:
    for folder in folders:
        if folder.is_symlink():
            yield KeptFile(os.path.realpath(folder), f"{folder} is a link to it: remove it by hand")
        elif folder.is_dir() and not _is_ours(folder):
            yield KeptFile(str(folder), "belongs to another user; your files in it are listed above")
    for workspace in tasks:
        if os.path.isdir(workspace):
            yield KeptFile(workspace, "a workspace: its configs, results and markers are yours")
    if tasks and (sessions := _open_sessions()):
        yield KeptFile("tmux", f"sessions of tasks are open: {', '.join(sessions)}; `exit` in each closes it")
    for name in _SHELL_FILES:
        path = Path.home() / name
        if "gpuyard completion" in _text(path):
            yield KeptFile(str(path), "has a line with `gpuyard completion`: remove it by hand")
    if "gpuyard" in run_tool("crontab", "-l")[0]:
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


def _files_named(folder: Path, what: str, pattern: str = "", shown: str = "") -> Iterator[InstalledFiles]:
    """Yield the matching files of a folder of this user, also if there are none; of a symbolic link only the link."""
    if folder.is_symlink():
        yield _single_file(folder, f"a link to {os.readlink(folder)}, which stays")
    elif folder.is_dir() and _is_ours(folder):
        names = tuple(name for name in _names_in(str(folder)) if re.fullmatch(pattern, name))
        is_own = not folder.stat().st_mode & _SHARED
        path = str(folder / shown) if shown else str(folder)
        yield InstalledFiles(what=what, folder=str(folder), names=names, shown=path, is_own_folder=is_own)


def _interrupted_activations(folder: Path) -> Iterator[InstalledFiles]:
    """Yield the folders of activations of conda environments, except those under way: they are locked."""
    for place in _own_files(
        folder, "left by an interrupted `workspace start`", r"gpuyard-conda-\w+", "gpuyard-conda-*"
    ):
        names = tuple(name for name in place.names if not _is_locked(folder / name))
        if names:
            yield replace(place, names=names)


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def _own_files(folder: Path, what: str, pattern: str, shown: str) -> Iterator[InstalledFiles]:
    """Yield the matching files that belong to this user, in a folder that other users may use too."""
    own = tuple(name for name in _names_in(str(folder)) if re.fullmatch(pattern, name) and _is_ours(folder / name))
    if own:
        yield InstalledFiles(what=what, folder=str(folder), names=own, shown=str(folder / shown), is_own_folder=False)


def _names_in(folder: str) -> list[str]:
    """Return the entries, or none if the folder cannot be read: `remove` reports that it cannot be emptied."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _single_file(path: Path, what: str) -> InstalledFiles:
    return InstalledFiles(what=what, folder=str(path.parent), names=(path.name,), shown=str(path), is_own_folder=False)


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
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
