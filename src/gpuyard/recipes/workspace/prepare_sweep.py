"""Prepare a sweep: choose its configs and their GPUs, and the command, arguments and environment of its tasks.
Everything is checked before any task starts. A config becomes `--config_path FILE`, or what the user's own function
(`parser`) returns for it. That runs in a process of its own, this module's `main`, with the workspace, `work_dir` and
PYTHONPATH on its path. What it prints is dropped, but for the last line if it fails."""

import contextlib
import difflib
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Container, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from yaml.constructor import SafeConstructor

from gpuyard.config import load_config
from gpuyard.engines.open_cluster_engine import LOCAL
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.lease import Need
from gpuyard.model.machine_snapshot import Vendor
from gpuyard.model.printable_text import natural_order
from gpuyard.policy.device_names import choose_vendor, refuse_while_silent
from gpuyard.probes.local_machine import snapshot
from gpuyard.recipes.workspace.settings import WorkspaceSettings
from gpuyard.recipes.workspace.workspace_files import check_config_names
from gpuyard.recipes.workspace.yaml_settings import compose_file
from gpuyard.system.processes import python_command, user_name
from gpuyard.visible_devices import visible_devices


def find_configs(settings: WorkspaceSettings) -> list[Path]:
    """Return all configs in natural order: batch2 comes before batch10."""
    folder = Path(settings.config_dir)
    try:
        names = sorted(os.listdir(folder), key=lambda name: (natural_order(os.path.splitext(name)[0]), name))
    except OSError as error:
        hint = "create it, and put a YAML file per task into it"
        raise UserError(f"config_dir: cannot read {folder}: {error.strerror}", hint=hint) from error
    matching = [name for name in names if fnmatch.fnmatchcase(name, settings.config_pattern) and name[0] != "."]
    found = [folder / name for name in matching if (folder / name).is_file()]
    check_config_names(found)
    return found


def split_lists(settings: WorkspaceSettings, words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split words such as `a.yml b.yml 1,0` into lists of configs and of GPUs. After the first word, a number is a
    GPU."""
    known = {name for path in find_configs(settings) for name in (path.name, path.stem) if not name.isdigit()}
    end = min(1, len(words))
    while end < len(words) and all(os.path.basename(name) in known for name in _names_in(words[end], known)):
        end += 1
    return words[:end], words[end:]


def _names_in(text: str, known: Container[str]) -> list[str]:
    """Return the names of a list. A comma may be part of a known name."""
    return [text] if text in known else [name.strip() for name in text.split(",") if name.strip()]


def choose_configs(settings: WorkspaceSettings, workspace: Path, lists: Sequence[str]) -> list[Path]:
    configs = find_configs(settings)
    if not "".join(lists).strip():
        if not configs:
            hint = "put a YAML file per task there, or set config_pattern"
            raise UserError(f"no config in {settings.config_dir} matches {settings.config_pattern}", hint=hint)
        return configs
    known = {path.name: path for path in configs}
    names = [name for text in lists for name in _names_in(text, known)]
    chosen = [_find_config(name, known, settings, workspace) for name in names]
    if len(set(chosen)) < len(chosen):
        twice = next(path.name for path in chosen if chosen.count(path) > 1)
        raise UserError(f"'{twice}' is named twice", hint="name each config once")
    return chosen


def _find_config(written: str, known: dict[str, Path], settings: WorkspaceSettings, workspace: Path) -> Path:
    folder, name = os.path.split(written)
    folders = [os.path.realpath(os.path.join(base, folder)) for base in (".", workspace)]
    for path in known.values():
        if name in (path.name, path.stem) and (not folder or os.path.realpath(path.parent) in folders):
            return path
    near = difflib.get_close_matches(name, [*known, *(path.stem for path in known.values())], n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"the configs are: {', '.join(known) or 'none'}"
    raise UserError(f"there is no config '{written}' in {settings.config_dir}", hint=hint)


def choose_devices(settings: WorkspaceSettings, count: int, text: str | None) -> tuple[list[str | None], list[str]]:
    """Return the devices that each config may use (None: any device), and notes for the user."""
    if text is not None and text.strip():
        names: list[str | None] = [name.strip() for name in text.split(",")]
        if "" in names:
            raise UserError(f"'{text}' is not a list of GPUs", hint="name one for each config, as 1,0,0")
        if len(names) not in (1, count):
            hint = "name one for each config, or one for all"
            raise UserError(f"{len(names)} GPUs are named for {count} configs", hint=hint)
        return (names * count if len(names) == 1 else names), []
    if not settings.gpu_count or settings.engine not in (None, LOCAL):
        return [None] * count, []
    seen = snapshot()
    need = Need(vendor=Vendor(settings.vendor) if settings.vendor else None)
    preferred = load_config().devices.vendor
    refuse_while_silent(need.vendor or preferred, seen)
    _, devices = choose_vendor(need, visible_devices(seen), seen, preferred=preferred)
    first = ",".join(device.id for device in devices[: settings.gpu_count])
    notes = []
    if devices and len(devices) < settings.gpu_count:
        notes.append(f"gpu_count is {settings.gpu_count}, but this machine has {len(devices)} GPUs; using all of them")
    return [first or None] * count, notes


def activate_environment(name: str, environment: Mapping[str, str], *, timeout_s: float = 60.0) -> dict[str, str]:
    """Return `environment` with the conda environment (a name or a path) activated by the first tool that knows it."""
    if name.startswith("-"):
        raise UserError(f"conda_env: '{name}' cannot be the name of an environment")
    tools = find_tools(environment)
    if not tools:
        hint = "put one of them on PATH, set CONDA_EXE to its path, or python_env to an absolute path"
        raise UserError(f"conda_env is '{name}', but conda, mamba and micromamba were not found", hint=hint)
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder, "environment")
        program = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
        dumper = [sys.executable, "-I", "-c", program, str(dump)]
        for tool in tools:
            command = [tool, "run", "-p" if "/" in name else "-n", name, *dumper]
            try:
                done = _run(command, environment, timeout_s)
            except subprocess.TimeoutExpired:
                hint = "run `conda activate` in a terminal to see whether it returns, and check the environment's hooks"
                message = f"the conda environment '{name}' was not activated within {timeout_s:g} s"
                raise EnvironmentFault(message, hint=hint) from None
            if dump.exists():
                after = json.loads(dump.read_bytes())
                # Set on the way; the last by Python, and so conda, for itself if the environment has no locale.
                unchanged = {key: environment.get(key) for key in ("_", "SHLVL", "PWD", "OLDPWD", "LC_CTYPE")}
                return {key: value for key, value in (after | unchanged).items() if value is not None}
            said = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
            errors.append(f"{tool} says: {said[-1][:200] if said else 'nothing'}")
    prefixes: list[str] = []  # the folders of all environments
    for tool in tools:
        with contextlib.suppress(ValueError, KeyError, TypeError, subprocess.TimeoutExpired):
            listed = _run([tool, "env", "list", "--json"], environment, timeout_s).stdout
            prefixes += [str(prefix) for prefix in json.loads(listed)["envs"]]
    known = sorted({_environment_name(prefix, prefixes) for prefix in prefixes})
    if known and name not in (*known, *prefixes):
        raise UserError(f"there is no conda environment '{name}'", hint=f"there are: {', '.join(known)}")
    raise EnvironmentFault(
        f"the conda environment '{name}' cannot be activated; {'; '.join(errors)}",
        hint=f"try `{shlex.join([tools[0], 'run', '-n', name, 'env'])}`; a hook in the environment's "
        "etc/conda/activate.d may end the shell",
    )


def _run(command: list[str], environment: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """Run a command with its output in files: a process that a hook leaves behind would keep a pipe open."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
        try:
            process = subprocess.Popen(command, **streams, env=environment, start_new_session=True)
        except OSError as error:
            return subprocess.CompletedProcess(command, 126, b"", str(error).encode())
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, status, output.read(), errors.read())


def find_tools(environment: Mapping[str, str]) -> list[str]:
    """Return the paths of installed tools, each once: from CONDA_EXE and MAMBA_EXE, then PATH, then usual places."""
    named = [environment.get("CONDA_EXE"), environment.get("MAMBA_EXE")]
    # conda before mamba: early versions of mamba cannot activate, and are installed beside a conda.
    tools = ("conda", "mamba", "micromamba")
    on_path = [shutil.which(tool, path=environment.get("PATH", os.defpath)) for tool in tools]
    home = environment.get("HOME") or os.path.expanduser("~")
    roots = ("miniconda3", "miniforge3", "mambaforge", "anaconda3", "miniconda", "anaconda", "conda")
    usual = [f"{folder}/{root}/bin/conda" for folder in (home, "/opt") for root in roots]
    usual += [f"{home}/{folder}/micromamba" for folder in (".local/bin", "bin")]
    by_real_path: dict[str, str] = {}
    for path in (*named, *on_path, *usual):
        if path and os.path.isfile(path) and os.access(path, os.X_OK):
            by_real_path.setdefault(os.path.realpath(path), path)
    return list(by_real_path.values())


def _environment_name(prefix: str, prefixes: list[str]) -> str:
    folder, name = os.path.split(prefix)
    if os.path.basename(folder) == "envs":
        return name
    return "base" if any(os.path.dirname(each) == f"{prefix}/envs" for each in prefixes) else prefix


def task_environment(settings: WorkspaceSettings) -> tuple[dict[str, str], list[str]]:
    """Return this process's environment with the conda environment and the workspace's `env`, and notes for the user.
    An interpreter with an absolute path runs without conda, too."""
    # A task runs in its own terminal.
    dropped = ("TMUX", "TMUX_PANE", "COLUMNS", "LINES")
    variables = {name: value for name, value in os.environ.items() if name not in dropped}
    notes = []
    if settings.conda_env is not None:
        if os.path.isabs(os.path.expanduser(settings.python_env)) and not find_tools(variables):
            notes.append(
                f"conda_env '{settings.conda_env}' is not activated: conda, mamba and micromamba were not found; "
                f"tasks run {settings.python_env} without its variables"
            )
        else:
            variables = activate_environment(settings.conda_env, variables)
    return {**variables, **settings.env}, notes


def task_command(settings: WorkspaceSettings, workspace: Path, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return `python train.py`, without arguments. `python_env` is a program on PATH or a path, with or without
    arguments, or a virtualenv; with an `image`, it is the image's."""
    if not os.path.isdir(settings.work_dir):
        raise UserError(f"work_dir: there is no folder {settings.work_dir}", hint="create it, or set work_dir")
    if not os.path.isfile(settings.script_path):
        hint = "paths are relative to the workspace, or to work_dir for the script"
        raise UserError(f"script_path: there is no script {settings.script_path}", hint=hint)
    text = settings.python_env
    path = os.path.join(workspace, os.path.expanduser(text))
    words = [each for each in (f"{path}/bin/python", path if os.sep in text else "") if os.path.isfile(each)][:1]
    if not words or settings.image is not None:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UserError(f"python_env: cannot parse '{text}': {error}", hint="close its quotes") from error
    if settings.image is None:
        words[0] = _executable("python_env", words[0], workspace, environment)
    return (*words, path_in_work_dir(settings.script_path, settings))


def hook_command(settings: WorkspaceSettings, workspace: Path, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command of `hook`, or () if it is not set. Its path is relative to the workspace."""
    if settings.hook is None:
        return ()
    return (_executable("hook", settings.hook[0], workspace, environment), *settings.hook[1:])


def path_in_work_dir(path: str, settings: WorkspaceSettings) -> str:
    """Return a path relative to `work_dir` if it is inside. The result never looks like an option."""
    inside = os.path.relpath(path, settings.work_dir)
    if inside.startswith(os.pardir + os.sep) or inside == os.pardir:
        return path
    return f"./{inside}" if inside.startswith("-") else inside


def task_mounts(settings: WorkspaceSettings) -> list[str] | None:
    """Return what a task's container is given besides `work_dir`; None without an `image`."""
    if settings.image is None:
        return None
    os.makedirs(settings.output_dir, exist_ok=True)
    folders = (settings.config_dir, settings.output_dir, os.path.dirname(settings.script_path))
    work_dir = os.path.normpath(settings.work_dir)
    outside = [each for each in map(os.path.normpath, folders) if os.path.commonpath([each, work_dir]) != work_dir]
    return [*dict.fromkeys(outside), *settings.mounts]


def _executable(key: str, written: str, workspace: Path, environment: Mapping[str, str]) -> str:
    """Find a name on PATH; a path is relative to the workspace."""
    program = os.path.expanduser(written)
    program = os.path.join(workspace, program) if os.sep in program else program
    found = shutil.which(program, path=environment.get("PATH", os.defpath))
    if found is None:
        what = f"{program} is not executable" if os.path.exists(program) else f"there is no program '{program}'"
        noun = "an interpreter" if key == "python_env" else "a program"
        raise UserError(f"{key}: {what}", hint=f"give {noun} on PATH (of the conda environment), or its path")
    return found


def arguments_of(
    settings: WorkspaceSettings, paths: Sequence[Path], workspace: Path, file: str, environment: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """Return the arguments of each config. A `parser` runs only from settings (in `file`) of this user."""
    if settings.parser is None:
        return [("--config_path", path_in_work_dir(str(path), settings)) for path in paths]
    owner = os.stat(file).st_uid
    if owner not in (0, os.geteuid()):
        why = f"parser: {file} belongs to {user_name(owner)}, and a parser runs only from settings of your own"
        raise UserError(why, hint="copy the file, and name the copy with --config")
    for path in paths:
        compose_file(path)
    module = "gpuyard.recipes.workspace.prepare_sweep"
    command = python_command(module, settings.parser, str(workspace), settings.work_dir, options=("-P",))
    given = json.dumps([str(path) for path in paths]).encode()
    options: dict[str, Any] = {"cwd": settings.work_dir, "env": environment}
    done = subprocess.run(command, input=given, capture_output=True, check=False, **options)
    results = done.stdout.splitlines()
    if len(results) < len(paths):
        said = done.stderr.decode(errors="replace").strip()
        what = said.rpartition("\n")[2] or f"it ended Python with status {done.returncode}"
        places = re.findall(r'^ *(File "[^<].*", line \d+), in (?!main$)', said, re.MULTILINE)
        hint = places[-1] if places else None
        if what.startswith("ModuleNotFoundError: "):
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
