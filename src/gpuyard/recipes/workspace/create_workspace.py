"""Create a workspace: `scheduler.sh`, `scheduler_config.yml`, and the folders for configs and markers.

Never loses existing work. An existing configuration keeps its text, and new keys are appended as comments; a file is
copied under an unused name before it is replaced; existing folders stay untouched. Files are written atomically, and
creating a workspace a second time changes nothing.
"""

import contextlib
import itertools
import os
import shutil
import sys
from pathlib import Path

from msgspec import Struct

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.workspace.settings import CONFIG_FILE, LoadedSettings, default_task_name, load
from gpuyard.recipes.workspace.templates import add_missing_keys, config_text, scheduler_script
from gpuyard.system.atomic_files import write_atomically

SCRIPT = "scheduler.sh"


class CreatedWorkspace(Struct, frozen=True, kw_only=True):
    """The files that were created, left unchanged, or replaced (each with the path of its backup)."""

    folder: Path
    created: tuple[Path, ...] = ()
    kept: tuple[Path, ...] = ()
    backed_up: tuple[tuple[Path, Path], ...] = ()


def init(folder: Path, *, force: bool) -> CreatedWorkspace:
    """Create a workspace. Raises UserError and changes nothing if one exists there and `force` is False."""
    folder = Path(os.path.abspath(folder))
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{folder} exists and is not a folder", hint="choose another path")
    if not force:
        _refuse_existing(folder)
    try:
        return _WorkspaceWriter(folder).write_all()
    except OSError as error:
        raise EnvironmentFault(f"cannot create the workspace {folder}: {error.strerror}: {error.filename}") from error


def _refuse_existing(folder: Path) -> None:
    for name in (CONFIG_FILE, SCRIPT):
        if os.path.lexists(folder / name):
            raise UserError(
                f"{folder} is a workspace already: it has {name}",
                hint="--force updates it: your values are kept, and replaced files are backed up",
            )


class _WorkspaceWriter:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._created: list[Path] = []
        self._kept: list[Path] = []
        self._backed_up: list[tuple[Path, Path]] = []

    def write_all(self) -> CreatedWorkspace:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write_config(self._folder / CONFIG_FILE)
        script = scheduler_script(sys.executable).encode("utf-8", "surrogateescape")
        self._write_file(self._folder / SCRIPT, script, mode=0o777)
        for folder in _configured_folders(self._folder):
            self._create_folder(folder)
        return CreatedWorkspace(
            folder=self._folder,
            created=tuple(self._created),
            kept=tuple(self._kept),
            backed_up=tuple(self._backed_up),
        )

    def _write_config(self, path: Path) -> None:
        if not os.path.lexists(path):
            self._write_file(path, config_text(default_task_name(self._folder)).encode())
        # A symbolic link may be shared with other workspaces, and a file with mistakes is for its owner to correct.
        elif path.is_symlink() or _load_if_valid(self._folder) is None:
            self._kept.append(path)
        else:
            self._write_file(path, add_missing_keys(path.read_bytes().decode()).encode())

    def _write_file(self, path: Path, content: bytes, *, mode: int = 0o666) -> None:
        if not os.path.lexists(path):
            self._created.append(path)
        elif not path.is_symlink() and path.read_bytes() == content:
            self._kept.append(path)
            return
        else:
            self._backed_up.append((path, _back_up(path)))
        _write(path, content, mode)

    def _create_folder(self, path: Path) -> None:
        if os.path.lexists(path):
            self._kept.append(path)
            return
        path.mkdir(parents=True)
        self._created.append(path)


def _load_if_valid(folder: Path) -> LoadedSettings | None:
    try:
        return load(folder)
    except UserError:
        return None


def _configured_folders(folder: Path) -> list[Path]:
    """Return config_dir and output_dir, each only if it is inside the workspace."""
    loaded = _load_if_valid(folder)
    if loaded is None:
        return []
    named = [Path(loaded.settings.config_dir), Path(loaded.settings.output_dir)]
    return [path for path in named if folder in path.parents and ".." not in path.parts]


def _back_up(path: Path) -> Path:
    """Copy to the first unused name of NAME.bak, NAME.bak-2 and so on, and return its path."""
    for number in itertools.count(1):
        backup = path.with_name(f"{path.name}.bak" if number == 1 else f"{path.name}.bak-{number}")
        with contextlib.suppress(FileExistsError):
            _copy(path, backup)
            break
    return backup


def _copy(path: Path, backup: Path) -> None:
    if path.is_symlink():
        os.symlink(os.readlink(path), backup)
        return
    content = path.read_bytes()
    with open(os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content)
    shutil.copystat(path, backup)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace a file atomically, keeping the permissions of the file that it replaces."""
    before = path.stat().st_mode & 0o777 if path.is_file() and not path.is_symlink() else None
    write_atomically(path, content, mode=mode, exact_mode=None if before is None else before | (mode & 0o100))
