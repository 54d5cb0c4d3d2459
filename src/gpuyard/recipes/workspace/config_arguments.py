"""The arguments that a config becomes: `--config_path FILE`, or what the user's own function returns for it (`parser`).

The function runs in a process of its own, which is this module's `main`: with this Python, in `work_dir`, and with the
workspace, `work_dir` and PYTHONPATH on its path. What it prints is dropped, but for the last line if it fails.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from yaml.constructor import SafeConstructor

from gpuyard.errors import UserError
from gpuyard.recipes.workspace.prepare_sweep import path_in_work_dir
from gpuyard.recipes.workspace.settings import WorkspaceSettings
from gpuyard.recipes.workspace.yaml_settings import compose_file
from gpuyard.system.process_identity import user_name
from gpuyard.system.python_command import python_command

_PLACE = re.compile(r'^ *(File "[^<].*", line \d+), in (?!main$)', re.MULTILINE)
_NO_MODULE = "ModuleNotFoundError: "


def arguments_of(
    settings: WorkspaceSettings,
    paths: Sequence[Path],
    workspace: Path,
    settings_file: str,
    environment: Mapping[str, str],
) -> list[tuple[str, ...]]:
    """Return the arguments of each config. Raises UserError if the user's function fails for one, or if it is named in
    settings of another user."""
    if settings.parser is None:
        return [("--config_path", path_in_work_dir(str(path), settings)) for path in paths]
    owner = os.stat(settings_file).st_uid
    if owner not in (0, os.geteuid()):
        why = f"parser: {settings_file} belongs to {user_name(owner)}, and a parser runs only from settings of your own"
        raise UserError(why, hint="copy the file, and name the copy with --config")
    for path in paths:
        compose_file(path)
    module = "gpuyard.recipes.workspace.config_arguments"
    command = python_command(module, settings.parser, str(workspace), settings.work_dir, options=("-P",))
    done = subprocess.run(
        command,
        input=json.dumps([str(path) for path in paths]).encode(),
        capture_output=True,
        cwd=settings.work_dir,
        env=environment,
        check=False,
    )
    results = done.stdout.splitlines()
    if len(results) < len(paths):
        said = done.stderr.decode(errors="replace").strip()
        what = said.rpartition("\n")[2] or f"it ended Python with status {done.returncode}"
        hint = next(reversed(_PLACE.findall(said)), None)
        if what.startswith(_NO_MODULE):
            hint = f"{sys.executable} looks for modules in the workspace, in work_dir and on PYTHONPATH"
        raise UserError(f"parser: {settings.parser} failed for {paths[len(results)]}: {what}", hint=hint)
    return [tuple(json.loads(result)) for result in results]


def main() -> None:
    """Print the arguments of each config as a line of JSON. The paths of the configs come from standard input."""
    name, *folders = sys.argv[1:]
    paths = json.load(sys.stdin)
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:0] = folders
    module, _, function = name.partition(":")
    parse = getattr(import_module(module), function)
    for path in paths:
        node = compose_file(Path(path))
        config = {} if node is None else SafeConstructor().construct_document(node)
        if not isinstance(config, dict):
            raise TypeError("the config has no keys with values")
        arguments = parse(config, path)
        if not isinstance(arguments, list | tuple) or not all(isinstance(each, str) for each in arguments):
            raise TypeError(f"it returned {arguments!r}, and not a list of text")
        print(json.dumps(arguments), file=results, flush=True)
