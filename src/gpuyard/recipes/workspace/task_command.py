"""What a task is started with: the interpreter, the script, its config, and the environment they run in.

Whatever can be wrong with that is told before anything starts.
"""

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from gpuyard.errors import UserError
from gpuyard.recipes.workspace.conda_environment import activated
from gpuyard.recipes.workspace.settings import WorkspaceSettings

# A task is in a terminal of its own, whoever starts it and from where.
_OF_THIS_TERMINAL = ("TMUX", "TMUX_PANE", "COLUMNS", "LINES")


def environment_of(settings: WorkspaceSettings) -> dict[str, str]:
    """Ours, with the conda environment activated, and what the workspace sets."""
    ours = {name: value for name, value in os.environ.items() if name not in _OF_THIS_TERMINAL}
    if settings.conda_env is not None:
        ours = activated(settings.conda_env, ours)
    return {**ours, **settings.env}


def words_before_config(
    settings: WorkspaceSettings, workspace: Path, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """`python train.py --config_path`, checked."""
    if not os.path.isdir(settings.work_dir):
        raise UserError(f"work_dir: there is no folder {settings.work_dir}", hint="make it, or name another")
    if not os.path.isfile(settings.script_path):
        raise UserError(
            f"script_path: there is no script {settings.script_path}",
            hint="paths are relative to the workspace, or to work_dir for the script",
        )
    interpreter = _interpreter(settings, workspace, environment)
    return (*interpreter, path_for(settings.script_path, settings), "--config_path")


def hook_words(settings: WorkspaceSettings, workspace: Path, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The command of `hook`, checked; nothing where there is none. A path is relative to the workspace."""
    if settings.hook is None:
        return ()
    first, *others = settings.hook
    return (_executable("hook", _program(first, workspace), environment), *others)


def path_for(path: str, settings: WorkspaceSettings) -> str:
    """As the task names it: from its working directory where it lies in there. Never one that looks like an option."""
    inside = os.path.relpath(path, settings.work_dir)
    if inside.startswith(os.pardir + os.sep) or inside == os.pardir:
        return path
    return f"./{inside}" if inside.startswith("-") else inside


def _interpreter(settings: WorkspaceSettings, workspace: Path, environment: Mapping[str, str]) -> tuple[str, ...]:
    """A program on PATH, with words of its own or without; a path to one; or the folder of an environment."""
    text = settings.python_env
    path = os.path.join(workspace, os.path.expanduser(text))
    if os.path.isfile(f"{path}/bin/python"):
        return (_executable("python_env", f"{path}/bin/python", environment),)
    if os.path.isfile(path) and os.sep in text:
        return (_executable("python_env", path, environment),)
    try:
        first, *others = shlex.split(text)
    except ValueError as error:
        raise UserError(f"python_env: '{text}' cannot be split into words: {error}", hint="close its quotes") from error
    return (_executable("python_env", _program(first, workspace), environment), *others)


def _program(written: str, workspace: Path) -> str:
    """One on PATH by its name, or one in the workspace by its path."""
    word = os.path.expanduser(written)
    return os.path.join(workspace, word) if os.sep in word else word


def _executable(key: str, program: str, environment: Mapping[str, str]) -> str:
    found = shutil.which(program, path=environment.get("PATH", os.defpath))
    if found is None:
        what = f"{program} cannot be executed" if os.path.exists(program) else f"there is no program '{program}'"
        kind = "an interpreter" if key == "python_env" else "a program"
        raise UserError(f"{key}: {what}", hint=f"name {kind} that is on PATH (of the conda environment), or its path")
    return found
