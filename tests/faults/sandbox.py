"""Sandbox: a copy of the working tree with its own virtual environment, in which faults are planted.

The copy's `.venv` finds the package in the copy and all other packages in the project's `.venv`. An environment
variable such as PYTHONPATH would not work: tests start programs with `python -I`, or without any variables.
"""

import contextlib
import os
import shutil
import subprocess
import sysconfig
import time
import venv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults import record_failures
from tests.faults.fault import Fault

_END_WITHIN_S = 10.0
_SHELL_VARIABLES = frozenset({"PWD", "OLDPWD"})  # set in a shell that a user opened in the copy; it is not ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of pytest: `status` is None if it did not end in time; `failed` are ids of tests in order of failure."""

    status: int | None
    failed: list[str]
    output: str


class Sandbox:
    """`root` is the repository; the copy is made in `folder`, whose path should be short, since it contains sockets."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.tree = folder / "tree"
        self.python = self.tree / ".venv" / "bin" / "python"
        self._folder = folder
        # Python recompiles a file when its modification time differs, with a resolution of a second.
        self._next_mtime = int(time.time())
        _copy_tree(root, self.tree)
        _make_environment(root / ".venv", self.tree)

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Plant the fault in the copy for the duration of the block."""
        path = self.tree / fault.file
        source = path.read_text(encoding="utf-8")
        self._write(path, fault.applied_to(source))
        try:
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, content: str) -> None:
        path.write_text(content, encoding="utf-8")
        self._next_mtime += 2
        os.utime(path, (self._next_mtime, self._next_mtime))

    def pytest(self, *arguments: str, timeout_s: float, environment: Mapping[str, str]) -> Run:
        """Run pytest in the copy, and end processes that the tests left behind."""
        failures, printed = self._folder / "failed", self._folder / "output"
        failures.write_text("")
        plugin = ("-p", record_failures.__name__)
        command = [str(self.python), "-m", "pytest", f"--basetemp={self._folder}/t", *plugin, *arguments]
        with printed.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.tree,
                env={**environment, record_failures.FILE_VARIABLE: str(failures)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                status: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                self.end_processes()
                process.wait()
        failed = failures.read_text(encoding="utf-8").splitlines()
        return Run(
            status=status,
            failed=list(dict.fromkeys(failed)),
            output=printed.read_text(encoding="utf-8", errors="replace"),
        )

    def end_processes(self) -> None:
        """End every process that was started from the copy or works below it."""
        deadline = time.monotonic() + _END_WITHIN_S
        while (left := list(self._processes())) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)

    def _processes(self) -> Iterator[psutil.Process]:
        mark = f"{self._folder}/"
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                program, variables = process.cmdline()[:1], process.environ()
                texts = [*program, *(value for name, value in variables.items() if name not in _SHELL_VARIABLES)]
                if process.pid != os.getpid() and any(mark in text for text in texts):
                    yield process


def _copy_tree(root: Path, target: Path) -> None:
    """Copy all files that git tracks, and new files that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():  # a removed file is listed until the removal is committed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


def _make_environment(theirs: Path, tree: Path) -> None:
    ours = tree / ".venv"
    venv.EnvBuilder(with_pip=False, symlinks=True).create(ours)
    packages = [
        Path(sysconfig.get_path("purelib", vars={"base": str(base), "platbase": str(base)})) for base in (ours, theirs)
    ]
    # Python does not process .pth files in a folder that a .pth file adds, so the project's own package is not found.
    (packages[0] / "planted.pth").write_text(f"{tree / 'src'}\n{packages[1]}\n", encoding="utf-8")
    for script in (theirs / "bin").iterdir():
        with contextlib.suppress(UnicodeDecodeError):
            if not (ours / "bin" / script.name).exists():  # the interpreter's own scripts exist already
                _copy_script(script, ours / "bin" / script.name, str(theirs / "bin"))


def _copy_script(script: Path, target: Path, their_bin: str) -> None:
    """Copy a script that Python runs, with the interpreter of the copy."""
    first, newline, rest = script.read_text(encoding="utf-8").partition("\n")
    if first.startswith(f"#!{their_bin}/python"):
        target.write_text(f"#!{target.parent}/python{newline}{rest}", encoding="utf-8")
        shutil.copymode(script, target)
