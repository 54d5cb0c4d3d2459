"""Activate a conda environment: `conda run`, or that of mamba or micromamba, runs the activation hooks and tells the
variables. No command line is built from the environment's name."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuyard.errors import EnvironmentFault, UserError


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
