"""Sandbox: a copy of the working tree with an environment of its own, in which faults are planted.

The copy's `.venv` finds the package in the copy and everything else in the project's own `.venv`. An environment
variable such as PYTHONPATH would not do: tests start programs with `python -I`, or without any variables.
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

from tests.faults import noting
from tests.faults.fault import Fault

_END_WITHIN_S = 10.0
_OF_SHELLS = frozenset({"PWD", "OLDPWD"})  # somebody may have opened one in the copy to look around


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of pytest: `status` is None where it did not end in time; `failed` are ids of tests, the first first."""

    status: int | None
    failed: list[str]
    output: str


class Sandbox:
    """`root` is the repository; the copy is made in `folder`, which should have a short path: sockets lie below it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.tree = folder / "tree"
        self.python = self.tree / ".venv" / "bin" / "python"
        self._folder = folder
        # Python compiles a file anew when its time of change differs, which it knows to the second only.
        self._next_mtime = int(time.time())
        _copy_tree(root, self.tree)
        _make_environment(root / ".venv", self.tree)

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The fault is in the copy for the time of the block."""
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
        """Run pytest in the copy. Processes that the tests left behind are ended."""
        noted, printed = self._folder / "failed", self._folder / "output"
        noted.write_text("")
        words = [str(self.python), "-m", "pytest", f"--basetemp={self._folder}/t", "-p", noting.__name__, *arguments]
        with printed.open("wb") as output:
            process = subprocess.Popen(
                words,
                cwd=self.tree,
                env={**environment, noting.PLACE: str(noted)},
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
        failed = noted.read_text(encoding="utf-8").splitlines()
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
                words, variables = process.cmdline(), process.environ()
                told = [*words[:1], *(value for name, value in variables.items() if name not in _OF_SHELLS)]
                if process.pid != os.getpid() and any(mark in each for each in told):
                    yield process


def _copy_tree(root: Path, target: Path) -> None:
    """All files that git knows of, and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():  # one may be removed and not committed yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


def _make_environment(theirs: Path, tree: Path) -> None:
    ours = tree / ".venv"
    venv.EnvBuilder(with_pip=False, symlinks=True).create(ours)
    packages = [
        Path(sysconfig.get_path("purelib", vars={"base": str(base), "platbase": str(base)})) for base in (ours, theirs)
    ]
    # The folder of their packages is not searched for .pth files in turn, so their own copy of us is not found.
    (packages[0] / "planted.pth").write_text(f"{tree / 'src'}\n{packages[1]}\n", encoding="utf-8")
    for script in (theirs / "bin").iterdir():
        with contextlib.suppress(UnicodeDecodeError):
            if not (ours / "bin" / script.name).exists():  # the interpreter's own names are there already
                _copy_script(script, ours / "bin" / script.name, str(theirs / "bin"))


def _copy_script(script: Path, target: Path, their_bin: str) -> None:
    """Only those that Python runs; with our interpreter."""
    first, newline, rest = script.read_text(encoding="utf-8").partition("\n")
    if first.startswith(f"#!{their_bin}/python"):
        target.write_text(f"#!{target.parent}/python{newline}{rest}", encoding="utf-8")
        shutil.copymode(script, target)
