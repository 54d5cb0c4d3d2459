"""A conda environment, activated: what the variables are after `conda activate NAME`, hooks and all.

No shell of the user's is needed. conda, mamba or micromamba is asked for the commands that activate, as its own shell
function asks; a shell runs them and tells its environment. That shell is bash where there is one, as `conda run` has
it: hooks of packages are written for it. What they return is of no account, as in `conda activate`: only a hook that
ends the shell, or never comes to an end, has failed.

A name goes to conda as an argument, and conda's commands to the shell as a file; nothing is pasted into a command.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from gpuyard.errors import EnvironmentFault, GpuyardError, UserError

TIMEOUT_S = 60.0
# conda before mamba: the first mambas do all but activate, and have a conda beside them.
_TOOLS = ("conda", "mamba", "micromamba")
_ROOTS = ("miniconda3", "miniforge3", "mambaforge", "anaconda3", "miniconda", "anaconda", "conda")
# Python gives an environment without a locale an LC_CTYPE of its own, so that one comes as an argument.
_TELL = """
import os, sys
environment = {**os.environb, b"LC_CTYPE": os.fsencode(sys.argv[2])}
with open(sys.argv[1], "wb") as file:
    file.write(b"\\0".join(name + b"=" + value for name, value in environment.items()))
"""
# What a shell sets for itself.
_THE_SHELLS_OWN = ("_", "SHLVL", "PWD", "OLDPWD")


class _Done(Struct, frozen=True, kw_only=True):
    status: int
    output: bytes
    complaint: str


def activated(name: str, environment: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> dict[str, str]:
    """`environment` with the conda environment activated, by its name or its path. UserError where there is no such
    environment, or no conda; EnvironmentFault where activating it fails or takes too long."""
    if name.startswith("-"):
        raise UserError(f"conda_env: '{name}' cannot be the name of an environment")
    with tempfile.TemporaryDirectory(prefix="gpuyard-conda-") as folder:
        return _Activation(name, environment, Path(folder), timeout_s).result()


class _Activation:
    def __init__(self, name: str, environment: Mapping[str, str], folder: Path, timeout_s: float) -> None:
        self._name = name
        self._before = dict(environment)
        self._folder = folder
        self._timeout_s = timeout_s

    def result(self) -> dict[str, str]:
        """By the first of the tools that knows the environment."""
        tools = find_tools(self._before)
        if not tools:
            raise UserError(
                f"conda_env is '{self._name}', and there is no conda, mamba or micromamba here",
                hint="put one on PATH, or set CONDA_EXE to where it is",
            )
        said = []
        for tool in tools:
            done = self._run(_asking(tool, self._name))
            if done.status == 0:
                return self._after(done.output)
            said.append(f"{tool} says: {done.complaint}")
        raise self._why_not(tools, said)

    def _after(self, commands: bytes) -> dict[str, str]:
        """The variables once these commands have run."""
        told, script = self._folder / "environment", self._folder / "activate.sh"
        teller = shlex.join([sys.executable, "-I", "-c", _TELL, str(told)])
        script.write_bytes(commands + os.fsencode(f'\nexec {teller} "${{LC_CTYPE-}}"\n'))
        done = self._run([shutil.which("bash") or "/bin/sh", str(script)])
        if done.status != 0 or not told.exists():
            raise EnvironmentFault(
                f"the conda environment '{self._name}' cannot be activated: {done.complaint}",
                hint=f"a hook in its etc/conda/activate.d ended the shell, with status {done.status}",
            )
        after = dict(_pairs(os.fsdecode(told.read_bytes())))
        return after | {name: self._before[name] for name in _THE_SHELLS_OWN if name in self._before}

    def _why_not(self, tools: list[str], said: list[str]) -> GpuyardError:
        prefixes = [prefix for tool in tools for prefix in self._prefixes(tool)]
        known = sorted({_called(prefix, prefixes) for prefix in prefixes})
        if known and self._name not in (*known, *prefixes):
            return UserError(f"there is no conda environment '{self._name}'", hint=f"there are: {', '.join(known)}")
        return EnvironmentFault(
            f"the conda environment '{self._name}' cannot be activated; {'; '.join(said)}",
            hint=f"try `{shlex.join([tools[0], 'env', 'list'])}`",
        )

    def _prefixes(self, tool: str) -> list[str]:
        """The folders of all environments that a tool knows; none where it does not say."""
        done = self._run([tool, "env", "list", "--json"])
        try:
            return [str(prefix) for prefix in json.loads(done.output)["envs"]]
        except (ValueError, KeyError, TypeError):
            return []

    def _run(self, words: list[str]) -> _Done:
        """Its output goes to files: what a hook leaves running may hold them open for as long as it likes."""
        with tempfile.TemporaryFile(dir=self._folder) as output, tempfile.TemporaryFile(dir=self._folder) as errors:
            try:
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env=self._before,
                    start_new_session=True,
                )
            except OSError as error:
                return _Done(status=126, output=b"", complaint=str(error))
            status = self._wait_for(process)
            output.seek(0)
            errors.seek(0)
            return _Done(status=status, output=output.read(), complaint=_last_words(errors.read()))

    def _wait_for(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise EnvironmentFault(
                f"the conda environment '{self._name}' was not activated within {self._timeout_s:g} s",
                hint="see whether `conda activate` comes to an end in a terminal, and what the environment's hooks do",
            ) from None


def find_tools(environment: Mapping[str, str]) -> list[str]:
    """Those that can activate, the likeliest first."""
    named = [environment.get("CONDA_EXE"), environment.get("MAMBA_EXE")]
    on_path = [shutil.which(tool, path=environment.get("PATH", os.defpath)) for tool in _TOOLS]
    home = environment.get("HOME") or os.path.expanduser("~")
    usual = [f"{place}/{root}/bin/conda" for place in (home, "/opt") for root in _ROOTS]
    usual += [f"{home}/{folder}/micromamba" for folder in (".local/bin", "bin")]
    there = [path for path in (*named, *on_path, *usual) if path and os.path.isfile(path) and os.access(path, os.X_OK)]
    first: dict[str, str] = {}
    for path in there:
        first.setdefault(os.path.realpath(path), path)
    return list(first.values())


def _asking(tool: str, name: str) -> list[str]:
    """What the tool's own shell function runs."""
    if os.path.basename(tool) == "conda":
        return [tool, "shell.posix", "activate", name]
    return [tool, "shell", "activate", "--shell", "posix", "--prefix", name]


def _called(prefix: str, prefixes: list[str]) -> str:
    """An environment's name as people give it; its path, where it has none."""
    folder, name = os.path.split(prefix)
    if os.path.basename(folder) == "envs":
        return name
    return "base" if any(os.path.dirname(each) == f"{prefix}/envs" for each in prefixes) else prefix


def _pairs(told: str) -> Iterator[tuple[str, str]]:
    for pair in told.split("\0"):
        name, _, value = pair.partition("=")
        if name not in _THE_SHELLS_OWN and (value or name != "LC_CTYPE"):
            yield name, value


def _last_words(complaint: bytes) -> str:
    lines = [line.strip() for line in complaint.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing"
