"""Workspaces for a test: its own queue, tmux server and simulated GPUs, and a real training script."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from gpuyard.recipes.workspace.workspace_files import init, workspace_tag
from tests.fakes import train
from tests.integration.queue_fixture import QueueUnderTest, is_gone
from tests.integration.session_fixture import OwnTmux
from tests.integration.terminal import Terminal

BIN = Path(sys.executable).parent
SETTINGS = {"task_name": "T", "startup_delay": 0, "command_delay": 0, "log_dir": "logs"}
TRAINING = {"seed": 7, "epochs": 2, "lr": 0.1}
DEADLINE_S = 90.0
_POLL_S = 0.03  # a task is three processes; polling must not slow them down


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        select.select([], [], [], _POLL_S)


class Workspace:
    """A workspace. Gated configs run until the test calls `let_go`."""

    def __init__(self, folder: Path, queue: QueueUnderTest, tmux: OwnTmux, **settings: Any) -> None:
        self.folder, self.work_dir, self.tmux = folder, folder, tmux
        self._queue = queue
        self._gates: dict[str, Path] = {}
        self._let_go: dict[str, int] = {}
        init(folder, force=False)
        shutil.copy(train.__file__, folder / "train.py")
        self.configure(**settings)

    @property
    def tag(self) -> str:
        return workspace_tag(self.folder)

    def configure(self, **settings: Any) -> None:
        """Write the configuration."""
        text = yaml.safe_dump({**SETTINGS, **settings}, allow_unicode=True)
        (self.folder / "scheduler_config.yml").write_text(text, encoding="utf-8")

    def add(self, *configs: str, **content: Any) -> None:
        for config in configs:
            text = yaml.safe_dump({**TRAINING, **content}, allow_unicode=True)
            (self.folder / "configs" / f"{config}.yml").write_text(text, encoding="utf-8")

    def add_gated(self, *configs: str, **content: Any) -> None:
        for config in configs:
            gate = self._gates[config] = self.folder / f"gate{len(self._gates)}"
            os.mkfifo(gate)
            self.add(config, gate=str(gate), **content)

    # Commands

    def scheduler(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.folder / "scheduler.sh", *arguments],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=self.folder,
            env={**os.environ, "COLUMNS": "300"},
        )  # fmt: skip

    def do(self, *arguments: str) -> str:
        done = self.scheduler(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> Any:
        return json.loads(self.do("status", "--json"))

    def rows(self) -> dict[str, Any]:
        return {row["config"]: row for row in self.status()["tasks"]}

    # Tasks

    def starts(self, config: str | None = None) -> list[Any]:
        return self._records("starts", config)

    def ends(self, config: str | None = None) -> list[Any]:
        """Return one record for each marker that was written."""
        return self._records("ends", config)

    def _records(self, name: str, config: str | None) -> list[Any]:
        path = self.work_dir / name
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [each for each in records if config in (None, each["config"])]

    def until_started(self, *configs: str, times: int = 1) -> None:
        until(lambda: all(len(self.starts(each)) >= times for each in configs), f"the start of {', '.join(configs)}")

    def let_go(self, *configs: str) -> None:
        """Open the gate of each config as soon as it waits there; if opened before, after its next start."""
        for config in configs:
            self._let_one_go(config)

    def _let_one_go(self, config: str) -> None:
        gate, before = self._gates[config], self._let_go.get(config, 0)
        until(lambda: len(self.starts(config)) > before and _is_opened(gate), f"{config} at its gate")
        self._let_go[config] = len(self.starts(config))

    def program(self, config: str) -> int:
        """Return the pid of its last start."""
        self.until_started(config)
        return int(self.starts(config)[-1]["pid"])

    def runner(self, config: str) -> int:
        return psutil.Process(self.program(config)).ppid()

    def keeper(self, config: str) -> int:
        return psutil.Process(self.runner(config)).ppid()

    # States

    def tasks(self) -> dict[str, Any]:
        """Return the tasks of the queue by config."""
        return {task["config"]: task for task in self._queue.get("/tasks", tag=self.tag)["tasks"]}

    def until_state(self, config: str, *states: str) -> Any:
        until(lambda: self.tasks()[config]["state"] in states, f"{config} {' or '.join(states)}")
        return self.tasks()[config]

    def until_running(self, *configs: str) -> None:
        """Wait until the configs are running and their programs have started."""
        for config in configs:
            self.until_state(config, "running")
            until(partial(self._is_at_work, config), f"the program of {config}")

    def _is_at_work(self, config: str) -> bool:
        starts = self.starts(config)
        return bool(starts) and not is_gone(int(starts[-1]["pid"]))

    def until_over(self) -> dict[str, Any]:
        """Wait for the end of all tasks, and return the rows of the status."""
        until(lambda: all(task["is_finished"] for task in self.tasks().values()), "the end of all tasks")
        return self.rows()

    def per_gpu(self) -> Counter[int]:
        """Return how many tasks run on each GPU."""
        return Counter(int(label) for task in self.tasks().values() if task["is_live"] for label in task["gpu_labels"])

    # Files and sessions

    def marker(self, config: str) -> Path:
        return self.folder / "out" / f"{config}_completed.txt"

    def markers(self) -> set[str]:
        return {path.name.removesuffix("_completed.txt") for path in (self.folder / "out").iterdir()}

    def log(self, config: str) -> str:
        """Return the log, or an empty string if there is none yet."""
        path = self.folder / "logs/train_logs" / f"{config}.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def scheduler_log(self) -> str:
        return (self.folder / "logs/T_scheduler.log").read_text(encoding="utf-8")

    def sessions(self) -> dict[str, list[str]]:
        """Return the names of tmux sessions by the owner in their @gpuyard option."""
        listed = self.tmux("list-sessions", "-F", "#{@gpuyard} #{session_name}").splitlines()
        pairs = [line.split(" ", 1) for line in listed]
        return {owner: [n for o, n in pairs if o == owner] for owner, _ in pairs if owner.startswith(f"{self.tag}/")}

    def session_names(self) -> set[str]:
        return {name for names in self.sessions().values() for name in names}


class Workspaces:
    """The workspaces of one test; the queue starts with the first."""

    def __init__(self, place: Path, queue: QueueUnderTest, tmux: OwnTmux) -> None:
        self.place, self.queue, self.tmux = place, queue, tmux

    def make(self, name: str = "sweep", **settings: Any) -> Workspace:
        if self.queue.daemon is None:
            self.queue.start()
        return Workspace(self.place / name, self.queue, self.tmux, **settings)

    @contextlib.contextmanager
    def attached(self, session: str) -> Iterator[Terminal]:
        """Attach a terminal to the session as soon as it exists."""
        until(lambda: session in self.tmux.sessions(), f"the session {session}")
        terminal = Terminal(["tmux", "-u", "attach", "-t", f"={session}"], self.tmux.environment)
        try:
            yield terminal
        finally:
            terminal.close()


def kill9(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: is_gone(pid), f"the end of {pid}")


def _is_opened(gate: Path) -> bool:
    """Open the gate if a program waits there; return whether it did."""
    try:
        os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _with_tmux(tmux: OwnTmux) -> dict[int, str]:
    """Return the processes of this tmux server: the servers, and the programs in them."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMUX_TMPDIR") == tmux.folder and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process.name()
    return found


@pytest.fixture(name="tmux")
def make_tmux(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnTmux]:
    """A tmux server that every program of the test finds. Checks that no process of it is left."""
    tmux = OwnTmux(own_home.parent)
    for name, value in tmux.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TMUX", raising=False)
    yield tmux
    tmux.close()
    until(lambda: not _with_tmux(tmux), f"the end of all that ran in tmux: {_with_tmux(tmux)}")


@pytest.fixture(name="workspaces")
def make_workspaces(tmux: OwnTmux, own_queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch) -> Workspaces:
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    return Workspaces(own_queue.home.parent, own_queue, tmux)


@pytest.fixture(name="workspace")
def make_workspace(workspaces: Workspaces) -> Workspace:
    return workspaces.make()
