"""The command and the environment of a task: interpreter, script, config, conda environment, hook.

Everything is checked before any task starts.
"""

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from gpuyard.errors import UserError
from gpuyard.recipes.workspace.conda_environment import activate_environment
from gpuyard.recipes.workspace.settings import WorkspaceSettings

# A task runs in its own terminal, so variables of the user's terminal are dropped.
_TERMINAL_VARIABLES = ("TMUX", "TMUX_PANE", "COLUMNS", "LINES")


def task_environment(settings: WorkspaceSettings) -> dict[str, str]:
    """Return this process's environment with the conda environment activated and the workspace's `env` added."""
    variables = {name: value for name, value in os.environ.items() if name not in _TERMINAL_VARIABLES}
    if settings.conda_env is not None:
        variables = activate_environment(settings.conda_env, variables)
    return {**variables, **settings.env}


def task_command(settings: WorkspaceSettings, workspace: Path, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return `python train.py --config_path`, without the config. Raises UserError if a part does not exist."""
    if not os.path.isdir(settings.work_dir):
        raise UserError(f"work_dir: there is no folder {settings.work_dir}", hint="create it, or set work_dir")
    if not os.path.isfile(settings.script_path):
        raise UserError(
            f"script_path: there is no script {settings.script_path}",
            hint="paths are relative to the workspace, or to work_dir for the script",
        )
    interpreter = _interpreter(settings, workspace, environment)
    return (*interpreter, path_in_work_dir(settings.script_path, settings), "--config_path")


def hook_command(settings: WorkspaceSettings, workspace: Path, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command of `hook`, or () if it is not set. Its path is relative to the workspace."""
    if settings.hook is None:
        return ()
    first, *others = settings.hook
    return (_executable("hook", _program(first, workspace), environment), *others)


def path_in_work_dir(path: str, settings: WorkspaceSettings) -> str:
    """Return a path relative to `work_dir` if it is inside. The result never looks like an option."""
    inside = os.path.relpath(path, settings.work_dir)
    if inside.startswith(os.pardir + os.sep) or inside == os.pardir:
        return path
    return f"./{inside}" if inside.startswith("-") else inside


def _interpreter(settings: WorkspaceSettings, workspace: Path, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command of `python_env`: a program on PATH or a path, with or without arguments, or a virtualenv."""
    text = settings.python_env
    path = os.path.join(workspace, os.path.expanduser(text))
    if os.path.isfile(f"{path}/bin/python"):
        return (_executable("python_env", f"{path}/bin/python", environment),)
    if os.path.isfile(path) and os.sep in text:
        return (_executable("python_env", path, environment),)
    try:
        first, *others = shlex.split(text)
    except ValueError as error:
        raise UserError(f"python_env: cannot parse '{text}': {error}", hint="close its quotes") from error
    return (_executable("python_env", _program(first, workspace), environment), *others)


def _program(written: str, workspace: Path) -> str:
    """Return a name as it is (found on PATH), and a path relative to the workspace."""
    program = os.path.expanduser(written)
    return os.path.join(workspace, program) if os.sep in program else program


def _executable(key: str, program: str, environment: Mapping[str, str]) -> str:
    found = shutil.which(program, path=environment.get("PATH", os.defpath))
    if found is None:
        what = f"{program} is not executable" if os.path.exists(program) else f"there is no program '{program}'"
        noun = "an interpreter" if key == "python_env" else "a program"
        raise UserError(f"{key}: {what}", hint=f"give {noun} on PATH (of the conda environment), or its path")
    return found
