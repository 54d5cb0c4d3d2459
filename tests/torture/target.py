"""What is tortured: the folders of one queue, its processes, and the commands that use it."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from msgspec import Struct

import gpuyard
from gpuyard.client.fast_http import DaemonConnection
from gpuyard.errors import GpuyardError
from tests.torture.evidence import EvidenceFile
from tests.torture.inject import Injector
from tests.torture.records import Happened

JOB, SCRIPT = (str(Path(__file__).with_name(name)) for name in ("job.py", "script.py"))
GPUYARD = (sys.executable, "-P", "-m", "gpuyard")
PYTHON = (sys.executable, "-I", "-S")
CAPACITY_MB = {"0": 24 * 1024.0, "1": 24 * 1024.0}
_SIMULATED = "2x24GB"
_CONFIG = '[queue]\ncpu_jobs = 4\nmin_free_memory_mb = 0\n[host]\nmin_free_disk = "0"\n'
_ROLES = {"daemon": "gpuyard.daemon", "keeper": "gpuyard.engines.local.keeper", "job": JOB, "script": SCRIPT}


class Finished(Struct, frozen=True, kw_only=True):
    """A command that ended: `status` is None if it was killed because it took too long."""

    status: int | None
    out: str
    err: str
    took_s: float


class Target:
    """One queue in `work`: its home, its ledger, its environment. `is_mounted`: they are small file systems."""

    def __init__(self, work: Path, root_pid: int, *, is_mounted: bool, injector: Injector | None) -> None:
        self.work, self.is_mounted, self.injector = work, is_mounted, injector
        self.home, self.ledger = work / "home", work / "locks"
        self.logs, self.simulated = self.home / "logs", self.home / "simulated"
        self.evidence = EvidenceFile(work / "evidence")
        self.happened = Happened()
        self._root = psutil.Process(root_pid)
        self._me = os.getpid()
        self._commands = (work / "commands.log").open("a", encoding="utf-8")
        self._writing = threading.Lock()
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(work),
            "PYTHONPATH": str(Path(gpuyard.__file__).parents[1]),
            "GPUYARD_HOME": str(self.home),
            "GPUYARD_LOCK_DIR": str(self.ledger),
            "GPUYARD_SIMULATE": _SIMULATED,
            **({} if injector is None else injector.environment),
        }

    def prepare(self, minutes: float, config: str = _CONFIG) -> None:
        """Make the folders, as small file systems if that is possible, with room for a run of so many minutes."""
        (self.home / "logs").mkdir(parents=True, mode=0o700) if not self.is_mounted else None
        sizes = {
            self.home: (16 + 2 * minutes, 1500),
            self.logs: (8 + 3 * minutes, 1500 + 250 * minutes),
            self.simulated: (1, 1000),
            self.ledger: (1, 600),
        }
        for folder, (megabytes, inodes) in sizes.items():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.is_mounted:
                options = f"size={megabytes:.0f}m,nr_inodes={inodes:.0f},mode=0700"
                subprocess.run(["mount", "-t", "tmpfs", "-o", options, "torture", str(folder)], check=True)
        (self.home / "config.toml").write_text(config)

    def unmount(self) -> list[str]:
        """Unmount all, and return those that some process still uses."""
        if not self.is_mounted:
            return []
        folders = (self.logs, self.simulated, self.ledger, self.home)
        return [str(each) for each in folders if subprocess.run(["umount", str(each)], check=False).returncode]

    # Processes

    def processes(self) -> Iterator[psutil.Process]:
        """Yield everything that this run started, without itself."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self._root.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if process.pid != self._me and process.status() != psutil.STATUS_ZOMBIE:
                        yield process

    def find(self, role: str) -> list[int]:
        """Return the pids of all `daemon`, `keeper`, `job` or `script` processes, the oldest first."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if _ROLES[role] in " ".join(process.cmdline()) and not _is_command(process.cmdline()):
                    found.append((process.create_time(), process.pid))
        return [pid for _, pid in sorted(found)]

    # Commands

    def gpuyard(self, *arguments: str, timeout_s: float = 120.0) -> Finished:
        return self.run([*GPUYARD, *arguments], timeout_s)

    def run(self, command: list[str], timeout_s: float, **more: str) -> Finished:
        """Run a command to its end, and write down how it went."""
        began = time.monotonic()
        process = subprocess.Popen(
            command, env={**self.environment, **more}, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
        status: int | None = None
        try:
            out, err = process.communicate(timeout=timeout_s)
            status = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        took_s = time.monotonic() - began
        with self._writing:
            typed = [each for each in command if each not in GPUYARD]
            record = {"at": round(began, 2), "took": round(took_s, 2), "status": status, "command": typed}
            self._commands.write(json.dumps({**record, "out": out[-500:], "err": err[-1500:]}) + "\n")
            self._commands.flush()
        return Finished(status=status, out=out, err=err, took_s=took_s)

    def status(self) -> Mapping[str, int] | None:
        """Return the number of jobs per state, or None if no daemon answers within 5 s."""
        try:
            with DaemonConnection(str(self.home / "daemon.sock"), may_start=False) as daemon:
                counts: dict[str, int] = daemon.request("GET", "/status", timeout_s=5.0)["counts"]
        except (GpuyardError, OSError):
            return None
        return counts

    def close(self) -> None:
        self._commands.close()


def _is_command(command: list[str]) -> bool:
    """Whether it is a client that only has the name of a role among its arguments: `gpuyard submit -- … job.py`."""
    return "gpuyard" in command[:5] or any("daemon_starter.py" in each for each in command)
