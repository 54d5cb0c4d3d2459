"""Activate a conda environment: compute the variables that `conda activate NAME` sets, activation hooks included.

The user's own shell is not needed. conda, mamba or micromamba prints its activation commands, as for its own shell
function; a shell runs them and dumps its environment. The shell is bash if installed, as in `conda run`, because hooks
of packages are written for bash. As with `conda activate`, the exit status of a hook is ignored: only a hook that ends
the shell or never returns has failed.

The environment's name goes to conda as an argument, and conda's commands go to the shell as a file; no command line is
built from either.
"""

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

from gpuyard.errors import EnvironmentFault, GpuyardError, UserError
from gpuyard.system.file_locks import locked

TIMEOUT_S = 60.0
# conda before mamba: early versions of mamba cannot activate, and are installed beside a conda.
_TOOLS = ("conda", "mamba", "micromamba")
_ROOTS = ("miniconda3", "miniforge3", "mambaforge", "anaconda3", "miniconda", "anaconda", "conda")
# Python sets LC_CTYPE when the environment has no locale, so the original value is passed as an argument.
_DUMP_ENVIRONMENT = """
import os, sys
environment = {**os.environb, b"LC_CTYPE": os.fsencode(sys.argv[2])}
with open(sys.argv[1], "wb") as file:
    file.write(b"\\0".join(name + b"=" + value for name, value in environment.items()))
"""
_SET_BY_SHELL = ("_", "SHLVL", "PWD", "OLDPWD")


def activate_environment(name: str, environment: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
    """Return `environment` with the conda environment `name` (a name or a path) activated. Raises UserError if the
    environment or conda itself is missing, EnvironmentFault if activation fails or times out."""
    if name.startswith("-"):
        raise UserError(f"conda_env: '{name}' cannot be the name of an environment")
    # `gpuyard uninstall` removes such folders, unless they are locked.
    with tempfile.TemporaryDirectory(prefix="gpuyard-conda-") as folder, locked(Path(folder)):
        return _Activation(name, environment, Path(folder), timeout_s).run()


class _Activation:
    def __init__(self, name: str, environment: Mapping[str, str], folder: Path, timeout_s: float) -> None:
        self._name, self._before = name, dict(environment)
        self._folder, self._timeout_s = folder, timeout_s

    def run(self) -> dict[str, str]:
        """Return the variables from the first tool that knows the environment."""
        tools = find_tools(self._before)
        if not tools:
            hint = "put one of them on PATH, set CONDA_EXE to its path, or python_env to an absolute path"
            raise UserError(f"conda_env is '{self._name}', but conda, mamba and micromamba were not found", hint=hint)
        errors = []
        for tool in tools:
            # The commands that the tools' own shell functions run.
            is_conda = os.path.basename(tool) == "conda"
            options = ["shell.posix", "activate"] if is_conda else ["shell", "activate", "--shell", "posix", "--prefix"]
            result = self._run([tool, *options, self._name])
            if result.returncode == 0:
                return self._run_activation(result.stdout)
            errors.append(f"{tool} says: {_last_line(result.stderr)}")
        raise self._explain_failure(tools, errors)

    def _run_activation(self, commands: bytes) -> dict[str, str]:
        """Return the variables after these shell commands have run."""
        dump, script = self._folder / "environment", self._folder / "activate.sh"
        dumper = shlex.join([sys.executable, "-I", "-c", _DUMP_ENVIRONMENT, str(dump)])
        script.write_bytes(commands + os.fsencode(f'\nexec {dumper} "${{LC_CTYPE-}}"\n'))
        result = self._run([shutil.which("bash") or "/bin/sh", str(script)])
        if result.returncode != 0 or not dump.exists():
            raise EnvironmentFault(
                f"the conda environment '{self._name}' cannot be activated: {_last_line(result.stderr)}",
                hint=f"a hook in its etc/conda/activate.d ended the shell with status {result.returncode}",
            )
        pairs = (pair.partition("=")[::2] for pair in os.fsdecode(dump.read_bytes()).split("\0"))
        after = {name: value for name, value in pairs if value or name != "LC_CTYPE"}
        unchanged = {name: self._before.get(name) for name in _SET_BY_SHELL}
        return {name: value for name, value in (after | unchanged).items() if value is not None}

    def _explain_failure(self, tools: list[str], errors: list[str]) -> GpuyardError:
        prefixes = [prefix for tool in tools for prefix in self._prefixes(tool)]
        known = sorted({_environment_name(prefix, prefixes) for prefix in prefixes})
        if known and self._name not in (*known, *prefixes):
            return UserError(f"there is no conda environment '{self._name}'", hint=f"there are: {', '.join(known)}")
        return EnvironmentFault(
            f"the conda environment '{self._name}' cannot be activated; {'; '.join(errors)}",
            hint=f"try `{shlex.join([tools[0], 'env', 'list'])}`",
        )

    def _prefixes(self, tool: str) -> list[str]:
        """Return the folders of all environments that a tool lists; none if it fails."""
        result = self._run([tool, "env", "list", "--json"])
        try:
            return [str(prefix) for prefix in json.loads(result.stdout)["envs"]]
        except (ValueError, KeyError, TypeError):
            return []

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[bytes]:
        """Run a command with its output in files: a process that a hook leaves behind would keep a pipe open."""
        with tempfile.TemporaryFile(dir=self._folder) as output, tempfile.TemporaryFile(dir=self._folder) as errors:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env=self._before,
                    start_new_session=True,
                )
            except OSError as error:
                return subprocess.CompletedProcess(command, 126, b"", str(error).encode())
            try:
                status = process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                hint = "run `conda activate` in a terminal to see whether it returns, and check the environment's hooks"
                message = f"the conda environment '{self._name}' was not activated within {self._timeout_s:g} s"
                raise EnvironmentFault(message, hint=hint) from None
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(command, status, output.read(), errors.read())


def find_tools(environment: Mapping[str, str]) -> list[str]:
    """Return the paths of installed tools, each once: from CONDA_EXE and MAMBA_EXE, then PATH, then usual places."""
    named = [environment.get("CONDA_EXE"), environment.get("MAMBA_EXE")]
    on_path = [shutil.which(tool, path=environment.get("PATH", os.defpath)) for tool in _TOOLS]
    home = environment.get("HOME") or os.path.expanduser("~")
    usual = [f"{folder}/{root}/bin/conda" for folder in (home, "/opt") for root in _ROOTS]
    usual += [f"{home}/{folder}/micromamba" for folder in (".local/bin", "bin")]
    by_real_path: dict[str, str] = {}
    for path in (*named, *on_path, *usual):
        if path and os.path.isfile(path) and os.access(path, os.X_OK):
            by_real_path.setdefault(os.path.realpath(path), path)
    return list(by_real_path.values())


def _environment_name(prefix: str, prefixes: list[str]) -> str:
    """Return an environment's name as users write it, or its path if it has none."""
    folder, name = os.path.split(prefix)
    if os.path.basename(folder) == "envs":
        return name
    return "base" if any(os.path.dirname(each) == f"{prefix}/envs" for each in prefixes) else prefix


def _last_line(errors: bytes) -> str:
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing"
