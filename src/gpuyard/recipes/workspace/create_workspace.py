"""The making of a workspace: `scheduler.sh`, `scheduler_config.yml`, and the folders for configs and markers.

What is there already is somebody's work. A configuration keeps its text, and new keys come after it as comments; a file
that is replaced is copied beside itself first, over nothing; the folders are never looked into. Each file is written as
a whole or not at all, and making a workspace again changes nothing.
"""

import contextlib
import itertools
import os
import shutil
import sys
from pathlib import Path

from msgspec import Struct

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.workspace.settings import CONFIG_FILE, Loaded, default_task_name, load
from gpuyard.recipes.workspace.templates import configuration, scheduler_script, with_new_keys

SCRIPT = "scheduler.sh"


class Made(Struct, frozen=True, kw_only=True):
    """What was made, what was left as it was, and what was replaced, each with the copy of what it had been."""

    folder: Path
    created: tuple[Path, ...] = ()
    kept: tuple[Path, ...] = ()
    backed_up: tuple[tuple[Path, Path], ...] = ()


def init(folder: Path, *, force: bool) -> Made:
    """UserError, and nothing touched, where there is a workspace already that is not to be made anew."""
    folder = Path(os.path.abspath(folder))
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{folder} is there, and is no folder", hint="name another")
    if not force:
        _refuse_existing(folder)
    try:
        return _Making(folder).make()
    except OSError as error:
        raise EnvironmentFault(f"the workspace {folder} cannot be made: {error.strerror}: {error.filename}") from error


def _refuse_existing(folder: Path) -> None:
    for name in (CONFIG_FILE, SCRIPT):
        if os.path.lexists(folder / name):
            raise UserError(
                f"there is a workspace in {folder} already: it has {name}",
                hint="--force makes it anew: your values are kept, and what is replaced is backed up",
            )


class _Making:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._created: list[Path] = []
        self._kept: list[Path] = []
        self._backed_up: list[tuple[Path, Path]] = []

    def make(self) -> Made:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._make_configuration(self._folder / CONFIG_FILE)
        script = scheduler_script(sys.executable).encode("utf-8", "surrogateescape")
        self._make_file(self._folder / SCRIPT, script, mode=0o777)
        for folder in _folders(self._folder):
            self._make_folder(folder)
        return Made(
            folder=self._folder,
            created=tuple(self._created),
            kept=tuple(self._kept),
            backed_up=tuple(self._backed_up),
        )

    def _make_configuration(self, path: Path) -> None:
        if not os.path.lexists(path):
            self._make_file(path, configuration(default_task_name(self._folder)).encode())
        # One that is linked is shared with others; one with mistakes is for its owner to mend.
        elif path.is_symlink() or _loaded(self._folder) is None:
            self._kept.append(path)
        else:
            self._make_file(path, with_new_keys(path.read_bytes().decode()).encode())

    def _make_file(self, path: Path, content: bytes, *, mode: int = 0o666) -> None:
        if not os.path.lexists(path):
            self._created.append(path)
        elif not path.is_symlink() and path.read_bytes() == content:
            self._kept.append(path)
            return
        else:
            self._backed_up.append((path, _back_up(path)))
        _write(path, content, mode)

    def _make_folder(self, path: Path) -> None:
        if os.path.lexists(path):
            self._kept.append(path)
            return
        path.mkdir(parents=True)
        self._created.append(path)


def _loaded(folder: Path) -> Loaded | None:
    try:
        return load(folder)
    except UserError:
        return None


def _folders(folder: Path) -> list[Path]:
    """Those that the configuration names, where they are the workspace's own."""
    loaded = _loaded(folder)
    if loaded is None:
        return []
    named = [Path(loaded.settings.config_dir), Path(loaded.settings.output_dir)]
    return [path for path in named if folder in path.parents and ".." not in path.parts]


def _back_up(path: Path) -> Path:
    """A copy under a name that nothing had: NAME.bak, NAME.bak-2 and so on."""
    for name in itertools.chain([f"{path.name}.bak"], (f"{path.name}.bak-{number}" for number in itertools.count(2))):
        backup = path.with_name(name)
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
    """All of it, or what was there before. Who may read what is replaced may read this."""
    before = path.stat().st_mode & 0o777 if path.is_file() and not path.is_symlink() else None
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(beside, flags, mode if before is None else before & mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            if before is not None:
                os.fchmod(file.fileno(), before | (mode & 0o100))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
