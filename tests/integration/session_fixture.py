"""Tasks under their runner, and a tmux server of the test to view them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuyard.engines.common.spawn_program import LEASE_AT
from gpuyard.system.processes import python_command
from tests.integration.engine_fixture import DEADLINE_S, wait_for, wait_until_gone

OWNER = "tag/12345678"
# Passes the lease as the keeper does.
_WITH_LEASE = (
    "import os, sys\n"
    "lease = int(sys.argv[1])\n"
    f"os.dup2(lease, {LEASE_AT})\n"
    "os.set_inheritable(lease, False)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)


class OwnTmux:
    """A tmux server that no other test sees. The path of its socket has to be short."""

    def __init__(self, home: Path) -> None:
        self.folder = tempfile.mkdtemp(prefix="gy", dir="/tmp")
        self.environment = {"TMUX_TMPDIR": self.folder, "HOME": str(home)}

    def __call__(self, *arguments: str) -> str:
        environment = {**os.environ, **self.environment}
        environment.pop("TMUX", None)
        done = subprocess.run(["tmux", "-u", *arguments], env=environment, capture_output=True, text=True, check=False)
        return done.stdout.rstrip("\n") if not done.returncode else ""

    def server(self) -> int:
        return int(self("display-message", "-p", "#{pid}"))

    def sessions(self) -> list[str]:
        return self("list-sessions", "-F", "#{session_name}").splitlines()

    def viewer(self, name: str) -> int:
        return int(self("list-panes", "-t", f"={name}:", "-F", "#{pane_pid}"))

    def screen(self, name: str) -> str:
        """Return the screen with its scrollback."""
        return self("capture-pane", "-p", "-S", "-", "-t", f"={name}:")

    def wait_to_see(self, name: str, text: str) -> None:
        wait_for(lambda: text in self.screen(name), f"{text!r} on the screen of {name}")

    def wait_for_dead_pane(self, name: str) -> None:
        wait_for(lambda: self("list-panes", "-t", f"={name}:", "-F", "#{pane_dead}") == "1", f"a dead pane in {name}")

    def close(self) -> None:
        with contextlib.suppress(ValueError, ProcessLookupError):  # no server was started, or it has ended
            os.kill(self.server(), signal.SIGKILL)
        shutil.rmtree(self.folder)


class Task:
    """A task; `output` is what its runner wrote to the log of the job."""

    def __init__(self, process: "subprocess.Popen[bytes]", spec: dict[str, Any], output: Path) -> None:
        self._process = process
        self._output = output
        self.spec = spec
        self.runner = process.pid
        self.marker = Path(spec["marker"])

    def wait(self) -> int:
        return self._process.wait(DEADLINE_S)

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def record(self) -> dict[str, Any]:
        return dict(json.loads(Path(self.spec["record"]).read_text()))

    def output(self) -> str:
        return self._output.read_text(errors="surrogateescape")

    def wait_for_output(self, text: str) -> None:
        wait_for(lambda: text in self.output(), f"{text!r} in the output of the task")

    def program(self) -> int:
        children = Path(f"/proc/{self.runner}/task/{self.runner}/children")
        wait_for(lambda: children.read_text().split(), "the program")
        return int(children.read_text().split()[-1])

    def send(self, signum: int) -> None:
        """Send a signal as the daemon does: to all processes of the attempt, the runner first."""
        program = self.program()
        os.kill(self.runner, signum)
        os.kill(program, signum)

    def close(self) -> None:
        """Kill the runner and its children, which lose their terminal."""
        with contextlib.suppress(FileNotFoundError):
            left = Path(f"/proc/{self.runner}/task/{self.runner}/children").read_text().split()
            self._process.kill()
            for pid in map(int, left):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                wait_until_gone(pid, "a program")
        self._process.wait(DEADLINE_S)


class Tasks:
    def __init__(self, folder: Path, tmux: OwnTmux) -> None:
        self.folder = folder
        self.tmux = tmux
        self._all: list[Task] = []
        (folder / "sockets").mkdir(mode=0o700)
        (folder / ".gpuyard/ends").mkdir(parents=True)
        (folder / "work").mkdir()

    def start(
        self,
        *command: str,
        environment: dict[str, str] | None = None,
        lease: int | None = None,
        output: str | None = None,
        limit: int | None = None,
        **other: Any,
    ) -> Task:
        """Start a task. `limit`: the largest file size in bytes, to simulate a full disk."""
        spec = self._spec(list(command), **other)
        path = Path(output or self.folder / f"{spec['key']}.log")
        marks = {"GPUYARD_JOB_ID": str(spec["job"]), "GPUYARD_ATTEMPT": str(spec["attempt"])}
        arguments = [*python_command("gpuyard.engines.session.runner", json.dumps(spec))]
        if lease is not None:
            arguments = [sys.executable, "-c", _WITH_LEASE, str(lease), *arguments]
        if limit is not None:
            arguments = ["prlimit", f"--fsize={limit}", *arguments]
        with path.open("ab") as file:
            process = subprocess.Popen(
                arguments,
                cwd=self.folder / "work",
                env={**os.environ, **self.tmux.environment, **marks, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                pass_fds=() if lease is None else (lease,),
            )
        self._all.append(Task(process, spec, path))
        return self._all[-1]

    def sh(self, script: str, **other: Any) -> Task:
        return self.start("sh", "-c", script, **other)

    def _spec(self, command: list[str], **other: Any) -> dict[str, Any]:
        config = other.get("config", "exp1")
        job = other.get("job", len(self._all) + 1)
        return {
            "command": command,
            "key": f"{job}.1",
            "job": job,
            "attempt": 1,
            "sockets": str(self.folder / "sockets"),
            "config": config,
            "workspace": str(self.folder),
            "owner": OWNER,
            "gpu": "gpu0",
            "session": None,
            "closes_session": False,
            "marker": str(self.folder / f"out/{config}_completed.txt"),
            "record": str(self.folder / f".gpuyard/ends/{config}.json"),
            "log": str(self.folder / f"logs/train_logs/{config}.log"),
            "other_log": str(self.folder / f"logs/train_logs/TASK_{config}.log"),
            "scheduler_log": str(self.folder / "logs/TASK_scheduler.log"),
            "check_s": 0.1,
            "delay_s": 0.0,
            "grace_s": 0.2,
            **other,
        }

    def close(self) -> None:
        for each in self._all:
            each.close()


@pytest.fixture(name="tmux")
def a_tmux(tmp_path: Path) -> Iterator[OwnTmux]:
    tmux = OwnTmux(tmp_path)
    yield tmux
    tmux.close()


@pytest.fixture(name="tasks")
def some_tasks(tmp_path: Path, tmux: OwnTmux) -> Iterator[Tasks]:
    tasks = Tasks(tmp_path, tmux)
    yield tasks
    tasks.close()
