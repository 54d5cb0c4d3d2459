"""Select the configs of a workspace that the user named, and the GPUs that each may use."""

import difflib
import fnmatch
import os
from pathlib import Path

from gpuyard.core.natural_order import natural_order
from gpuyard.errors import UserError
from gpuyard.probes.local_machine import snapshot
from gpuyard.recipes.workspace.settings import WorkspaceSettings
from gpuyard.recipes.workspace.task_names import check_config_names
from gpuyard.visible_devices import visible_devices


def find_configs(settings: WorkspaceSettings) -> list[Path]:
    """Return all configs in natural order: batch2 comes before batch10."""
    folder = Path(settings.config_dir)
    try:
        names = sorted(os.listdir(folder), key=lambda name: (natural_order(os.path.splitext(name)[0]), name))
    except OSError as error:
        raise UserError(
            f"config_dir: cannot read {folder}: {error.strerror}",
            hint="create it, and put a YAML file per task into it",
        ) from error
    matching = [name for name in names if fnmatch.fnmatchcase(name, settings.config_pattern) and name[0] != "."]
    found = [folder / name for name in matching if (folder / name).is_file()]
    check_config_names(found)
    return found


def choose_configs(settings: WorkspaceSettings, workspace: Path, text: str | None) -> list[Path]:
    """Return the configs named by `text`, such as `heavy.yml,light`; all configs if it is None or blank."""
    configs = find_configs(settings)
    if text is None or not text.strip():
        if not configs:
            raise UserError(
                f"no config in {settings.config_dir} matches {settings.config_pattern}",
                hint="put a YAML file per task there, or set config_pattern",
            )
        return configs
    known = {path.name: path for path in configs}
    names = [text] if text in known else [name.strip() for name in text.split(",") if name.strip()]
    chosen = [_find_config(name, known, settings, workspace) for name in names]
    if len(set(chosen)) < len(chosen):
        twice = next(path.name for path in chosen if chosen.count(path) > 1)
        raise UserError(f"'{twice}' is named twice", hint="name each config once")
    return chosen


def _find_config(written: str, known: dict[str, Path], settings: WorkspaceSettings, workspace: Path) -> Path:
    folder, name = os.path.split(written)
    for path in known.values():
        if name in (path.name, path.stem) and (not folder or _is_same_folder(folder, path.parent, workspace)):
            return path
    near = difflib.get_close_matches(name, [*known, *(path.stem for path in known.values())], n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"the configs are: {', '.join(known) or 'none'}"
    raise UserError(f"there is no config '{written}' in {settings.config_dir}", hint=hint)


def _is_same_folder(written: str, folder: Path, workspace: Path) -> bool:
    """Whether `written` is `folder`, relative to the working directory or to the workspace."""
    return any(os.path.realpath(os.path.join(base, written)) == os.path.realpath(folder) for base in (".", workspace))


def choose_devices(settings: WorkspaceSettings, count: int, text: str | None) -> tuple[list[str | None], list[str]]:
    """Return the devices that each config may use (None: any device), and notes for the user."""
    if text is not None and text.strip():
        return _split_gpus(text, count), []
    if settings.gpu_count is None:
        return [None] * count, []
    devices = visible_devices(snapshot())
    first = ",".join(device.id for device in devices[: settings.gpu_count])
    notes = []
    if devices and len(devices) < settings.gpu_count:
        notes.append(f"gpu_count is {settings.gpu_count}, but this machine has {len(devices)} GPUs; using all of them")
    return [first or None] * count, notes


def _split_gpus(text: str, count: int) -> list[str | None]:
    names: list[str | None] = [name.strip() for name in text.split(",")]
    if "" in names:
        raise UserError(f"'{text}' is not a list of GPUs", hint="name one for each config, as 1,0,0")
    if len(names) == 1:
        return names * count
    if len(names) != count:
        raise UserError(
            f"{len(names)} GPUs are named for {count} configs", hint="name one for each config, or one for all"
        )
    return names
