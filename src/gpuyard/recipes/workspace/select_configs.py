"""Which configs of a workspace are meant, and which GPUs they are to have."""

import difflib
import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path

from gpuyard.core.natural_order import natural_order
from gpuyard.errors import UserError
from gpuyard.probes.local_machine import snapshot
from gpuyard.recipes.workspace.settings import WorkspaceSettings
from gpuyard.recipes.workspace.task_names import check_config_names
from gpuyard.visible_devices import visible_devices


def configs_of(settings: WorkspaceSettings) -> list[Path]:
    """All there are, in natural order: batch2 comes before batch10."""
    folder = Path(settings.config_dir)
    try:
        names = sorted(os.listdir(folder), key=lambda name: (natural_order(os.path.splitext(name)[0]), name))
    except OSError as error:
        raise UserError(
            f"config_dir: {folder} cannot be read: {error.strerror}", hint="make it, and put a YAML file per task in it"
        ) from error
    matching = [name for name in names if fnmatch.fnmatchcase(name, settings.config_pattern) and name[0] != "."]
    found = [folder / name for name in matching if (folder / name).is_file()]
    check_config_names(found)
    return found


def choose(settings: WorkspaceSettings, workspace: Path, text: str | None) -> list[Path]:
    """Those that are named, as `heavy.yml,light`; all, where none is."""
    there = configs_of(settings)
    if text is None or not text.strip():
        if not there:
            raise UserError(
                f"there is no config in {settings.config_dir} that is called {settings.config_pattern}",
                hint="put a YAML file per task there, or set config_pattern",
            )
        return there
    known = {path.name: path for path in there}
    words = [text] if text in known else [word.strip() for word in text.split(",") if word.strip()]
    chosen = [_one(word, known, settings, workspace) for word in words]
    if len(set(chosen)) < len(chosen):
        twice = next(path.name for path in chosen if chosen.count(path) > 1)
        raise UserError(f"'{twice}' is named twice", hint="a config runs once")
    return chosen


def _is_at(folder: str, there: Path, workspace: Path) -> bool:
    """A path is meant from here, or from the workspace."""
    return any(os.path.realpath(os.path.join(base, folder)) == os.path.realpath(there) for base in (".", workspace))


def _one(word: str, known: dict[str, Path], settings: WorkspaceSettings, workspace: Path) -> Path:
    folder, name = os.path.split(word)
    for path in known.values():
        if name in (path.name, path.stem) and (not folder or _is_at(folder, path.parent, workspace)):
            return path
    near = difflib.get_close_matches(name, [*known, *(path.stem for path in known.values())], n=1)
    meant = f"did you mean '{near[0]}'?" if near else f"those there are: {', '.join(known) or 'none'}"
    raise UserError(f"there is no config '{word}' in {settings.config_dir}", hint=meant)


def devices_for(settings: WorkspaceSettings, count: int, text: str | None) -> tuple[list[str | None], list[str]]:
    """For each config the devices it may use, by name, `None` for any; and what is to be said about that."""
    if text is not None and text.strip():
        return _listed(text, count), []
    if settings.gpu_count is None:
        return [None] * count, []
    there = visible_devices(snapshot())
    first = ",".join(device.id for device in there[: settings.gpu_count])
    notes = []
    if there and len(there) < settings.gpu_count:
        notes.append(f"gpu_count is {settings.gpu_count}, and this machine has {len(there)}: all of them are used")
    return [first or None] * count, notes


def _listed(text: str, count: int) -> list[str | None]:
    words: Sequence[str] = [word.strip() for word in text.split(",")]
    if "" in words:
        raise UserError(f"'{text}' is no list of GPUs", hint="write one for each config, as 1,0,0")
    if len(words) == 1:
        words = list(words) * count
    if len(words) != count:
        raise UserError(
            f"{len(words)} GPUs are named for {count} configs", hint="name one for each config, or one for all"
        )
    return list(words)
