"""`gpuyard uninstall`: find all files of this user's gpuyard, stop the daemon, and remove them.

- Outside gpuyard's own folders, only what the manifest (`system/files_outside_home.py`) names is listed, and a systemd
  unit and a completion that start gpuyard. In its own folders, only names that gpuyard gives; the rest is the user's.
- A symbolic link is removed as a link, at any depth: its target stays. What belongs to another user, or is mounted
  inside a folder, stays with the folders that contain it. A folder that is or contains the home folder is refused.
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
    path: str
    why: str


class FoundFiles(Struct, frozen=True, kw_only=True):
    places: tuple[InstalledFiles, ...]
    kept: tuple[KeptFile, ...]


class UninstallBlocker(Struct, frozen=True):
    text: str
    advice: str


# Find


def find() -> FoundFiles:
    """Return all files. Changes nothing. Raises UserError if a folder of gpuyard is or contains the user's home."""
    state, config, leases = Path(daemon_places.state_folder()), config_dir(), lease_dir()
    home = os.path.realpath(Path.home())
    for folder, setting in ((state, "GPUYARD_HOME"), (config, "GPUYARD_HOME"), (leases, "the lease directory")):
        if os.path.commonpath([place := os.path.realpath(folder), home]) == place:
            raise UserError(
                f"{setting} is {folder}, which is your home folder or contains it: nothing was removed",
                hint=f"remove gpuyard's files in it by hand: {folder}/queue.*, {folder}/daemon.*, and the files that "
                "`gpuyard daemon status` names",
            )
    outside = read_outside(state) if _is_ours(state) else {}
    places = [_single_file(path, "the systemd unit that runs the daemon") for path in _unit_files()]
    completion = _config_home() / "fish" / "completions" / "gpuyard.fish"
    if "_GPUYARD_COMPLETE" in _text(completion):
        places.append(_single_file(completion, "the completion of the fish shell"))
    places += _workspace_logs(outside.get(LOG, []))
    for path in map(Path, outside.get(CLUSTER, [])):
        places += [*_files_in(path, _JOB_FILES), *_files_named(path, "this queue's folder for a cluster")]
    for path in map(Path, outside.get(SNAPSHOTS, [])):
        places += _files_named(path, "snapshots of code", _SNAPSHOT_NAMES)
    names = r"\.?.+\.(lease|ticket|drain)|file-system\..+"
    if _is_shared(leases):
        what, shown = "your leases, in a directory that users share", "*.lease, *.ticket, *.drain"
        places += _own_files(leases, what, names, shown)
    else:
        places += _files_named(leases, "leases of GPUs", names)
    places += _files_named(config, "the configuration", r"config\.toml", "config.toml")
    # The queue's folder comes late, because the manifest in it tells where other files are.
    places += [*_files_in(state, _QUEUE_FILES), *_named_files(Path(named_state_directory()), state)]
    kept = (*_kept_files(outside.get(WORKSPACE, []), (state, config, leases)), *_unknown_files(places))
    return FoundFiles(places=tuple(places), kept=kept)


def _unit_files() -> list[Path]:
    """Return the user's systemd unit, if it starts gpuyard, and the link that enables it."""
    units = _config_home() / "systemd" / "user"
    if "gpuyard" not in _text(units / _UNIT):
        return []
    return [path for path in (units / "default.target.wants" / _UNIT, units / _UNIT) if os.path.lexists(path)]


def _named_files(named: Path, state: Path) -> Iterator[InstalledFiles]:
    """Yield the outputs of batches, and what this machine left in the folder on a shared disk that the queue's folder
    stands for. Other machines may have files there."""
    if not named.is_symlink():
        yield from _files_named(named / "batches", "outputs of batches without --output-root", r".+-[0-9a-f]{8}")
    if named != state:
        record = f"file-system.{host_name()}"
        yield from _own_files(named / "hosts", "where your queue is", re.escape(machine_name()), machine_name())
        yield from _own_files(named, "the result of a test", re.escape(record), record)


def _workspace_logs(logs: Iterable[str]) -> Iterator[InstalledFiles]:
    """Yield LOG_DIR/train_logs/NAME.log and LOG_DIR/TASK_scheduler.log, where they begin as gpuyard's logs do."""
    by_folder: dict[str, list[str]] = {}
    for log in logs:
        if not os.path.islink(log) and _text(Path(log)).startswith("# log of the workspace ") and _is_ours(Path(log)):
            by_folder.setdefault(os.path.dirname(log), []).append(os.path.basename(log))
    what = "logs of workspaces"
    for folder, names in by_folder.items():
        is_own = os.path.basename(folder) == "train_logs"
        shown = folder if is_own else os.path.join(folder, "*_scheduler.log")
        yield InstalledFiles(what=what, folder=folder, names=tuple(names), shown=shown, is_own_folder=is_own)


def _kept_files(workspaces: Sequence[str], folders: Iterable[Path]) -> Iterator[KeptFile]:
    for folder in folders:
        if folder.is_symlink():
            yield KeptFile(os.path.realpath(folder), f"{folder} is a link to it: remove it by hand")
        elif folder.is_dir() and not _is_ours(folder):
            yield KeptFile(str(folder), "belongs to another user; your files in it are listed above")
    for workspace in filter(os.path.isdir, workspaces):
        yield KeptFile(workspace, "a workspace: its configs, results and markers are yours")
    with contextlib.suppress(TmuxError):
        sessions = Tmux(os.environ).owned_sessions("") if workspaces else {}
        if names := sorted(name for owned in sessions.values() for name in owned):
            yield KeptFile("tmux", f"sessions of tasks are open: {', '.join(names)}; `exit` in each closes it")
    for name in (".bashrc", ".bash_profile", ".profile", ".zshrc", ".config/fish/config.fish"):
        if "gpuyard completion" in _text(path := Path.home() / name):
            yield KeptFile(str(path), "has a line with `gpuyard completion`: remove it by hand")
    if "gpuyard" in _run_tool("crontab", "-l")[0]:
        yield KeptFile("crontab", "has a line that starts gpuyard: remove it with `crontab -e`")


def _unknown_files(places: Iterable[InstalledFiles]) -> Iterator[KeptFile]:
    listed = {os.path.join(place.folder, name) for place in places for name in place.names}
    listed |= {place.folder for place in places}
    for folder in dict.fromkeys(place.folder for place in places if place.is_own_folder):
        for path in (os.path.join(folder, name) for name in _names_in(folder)):
            if path not in listed:
                yield KeptFile(path, "not created by gpuyard")


def _files_in(folder: Path, files: Iterable[tuple[str, str, str, str]]) -> Iterator[InstalledFiles]:
    """Yield what gpuyard creates in a folder of its own, and in the folders below."""
    for below, what, names, shown in (("", "", "", ""),) if folder.is_symlink() else files:
        yield from _files_named(folder / below, what, names, shown)


def _files_named(folder: Path, what: str, names: str = "", shown: str = "") -> Iterator[InstalledFiles]:
    """Yield the matching files of a folder of this user, also if there are none; of a symbolic link only the link."""
    if folder.is_symlink():
        yield _single_file(folder, f"a link to {os.readlink(folder)}, which stays")
    elif folder.is_dir() and _is_ours(folder):
        found = tuple(name for name in _names_in(folder) if re.fullmatch(names, name))
        path, is_own = str(folder / shown), not _is_shared(folder)
        yield InstalledFiles(what=what, folder=str(folder), names=found, shown=path, is_own_folder=is_own)


def _own_files(folder: Path, what: str, names: str, shown: str) -> Iterator[InstalledFiles]:
    """Yield the matching files that belong to this user, in a folder that other users may use too."""
    own = tuple(name for name in _names_in(folder) if re.fullmatch(names, name) and _is_ours(folder / name))
    if own:
        yield InstalledFiles(what=what, folder=str(folder), names=own, shown=str(folder / shown), is_own_folder=False)


def _single_file(path: Path, what: str) -> InstalledFiles:
    return InstalledFiles(what=what, folder=str(path.parent), names=(path.name,), shown=str(path), is_own_folder=False)


def _names_in(folder: str | Path) -> list[str]:
    """Return the entries, or none if the folder cannot be read: `remove` reports that it cannot be emptied."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _is_shared(folder: Path) -> bool:
    return folder.exists() and bool(folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


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
            command, capture_output=True, check=False, encoding="utf-8", errors="replace", timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"`{' '.join(command)}` failed: {error}"
    if done.returncode:
        return "", f"`{' '.join(command)}` failed: {done.stderr.strip()}"
    return done.stdout, None


def measure(place: InstalledFiles) -> tuple[int, int]:
    """Return the number of this user's files, and their bytes."""
    own = os.geteuid()
    with contextlib.suppress(OSError), FolderTree(place.folder, follows=not place.is_own_folder) as folder:
        entries = folder.walk(lambda _: None, place.names)
        sizes = [each.status.st_size for each in entries if each.status.st_uid == own and not each.is_folder]
        return len(sizes), sum(sizes)
    return 0, 0


# Remove


def find_blockers() -> list[UninstallBlocker]:
    found = []
    state, folder = Path(daemon_places.state_folder()), lease_dir()
    database = state / "queue.db"
    try:
        counts = count_unfinished(database) if _is_ours(state) else {}
    except EnvironmentFault as error:
        raise EnvironmentFault(
            f"cannot read {database}, so it is unknown whether jobs run or wait: {error}",
            hint=f"check with `gpuyard queue`; if no job runs, move {database} away and try again",
        ) from error
    if counts:
        text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        advice = "wait for them, or end them with `gpuyard cancel all` and then `gpuyard wait all`"
        found.append(UninstallBlocker(f"jobs run or wait ({text})", advice))
    own = []
    if folder.is_dir() and os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        contents = Ledger(folder).contents()
        holders = [*(each.holder for each in contents.leases), *(each.holder for each in contents.tickets)]
        own = [holder.pid for holder in holders if holder.uid == os.geteuid()]
    if own:
        pids = ", ".join(map(str, own[:5])) + (" and more" if len(own) > 5 else "")
        text = f"your programs hold GPUs or wait for them (pid {pids})"
        found.append(UninstallBlocker(text, "end them first; `gpuyard leases` shows them"))
    return found


def _refuse_while_in_use() -> None:
    if blockers := find_blockers():
        hint = "; ".join(each.advice for each in blockers)
        raise EnvironmentFault("nothing was removed: " + "; ".join(each.text for each in blockers), hint=hint)


def uninstall() -> list[KeptFile]:
    """Remove everything, unless something is in use. Return the listed files that could not be removed."""
    _refuse_while_in_use()
    has_unit = bool(_unit_files())
    problems = _systemctl("disable", "--now", _UNIT) if has_unit else []
    with contextlib.suppress(NoDaemon):
        with DaemonConnection(daemon_places.socket_path(), may_start=False, on_notice=lambda _: None) as daemon:
            pid = daemon.request("GET", "/status", timeout_s=_TIMEOUT_S)["pid"]
            daemon.request("POST", "/stop", body={"pid": pid, "reason": "`gpuyard uninstall`"}, timeout_s=_TIMEOUT_S)
        await_end(daemon_places.lock_path(), pid)
    with contextlib.ExitStack() as stack:
        # Its lock keeps a daemon from starting. Without a queue's folder, none can start.
        if Path(daemon_places.state_folder()).is_dir():
            try:
                stack.enter_context(hold_daemon_lock(daemon_places.lock_path()))
            except EnvironmentFault as error:
                text = f"nothing was removed: {error}, because it was started again"
                hint = "disable what starts it, such as a service manager, and try again"
                raise EnvironmentFault(text, hint=hint) from error
        _refuse_while_in_use()  # a job may have been submitted meanwhile
        problems += remove(find().places)
    return problems + (_systemctl("daemon-reload") if has_unit else [])


def _systemctl(*arguments: str) -> list[KeptFile]:
    """Run it for the user's units. Without systemd, the unit does not run."""
    problem = _run_tool("systemctl", "--user", *arguments)[1]
    return [] if problem is None else [KeptFile(_UNIT, problem)]


def remove(places: Iterable[InstalledFiles]) -> list[KeptFile]:
    """Remove the files, then gpuyard's own folders that are empty. Return what could not be removed."""
    places, problems = tuple(places), list[KeptFile]()
    for place in places:
        try:
            # A folder that is not gpuyard's own may be a symbolic link: on macOS, /tmp is.
            with FolderTree(place.folder, follows=not place.is_own_folder) as folder:
                for each in remove_entries(folder, place.names, keeps_others=True):
                    prefix = "" if isinstance(each, LeftAlone) else "cannot be removed: "
                    problems.append(KeptFile(each.filename, f"{prefix}{each.strerror}"))
        except FileNotFoundError:
            pass
        except OSError as error:
            problems.append(KeptFile(place.folder, f"cannot be opened: {error.strerror}"))
    for own in sorted({place.folder for place in places if place.is_own_folder}, key=len, reverse=True):
        try:
            if not os.listdir(own):
                os.rmdir(own)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(KeptFile(own, f"cannot be removed: {error.strerror}"))
    return problems
