"""The faults of a torture run: each begins, lasts a while, and is mended. A table names them all.

A fault on a process of a role (`daemon`, `keeper`) picks one that lives; if none does, it does nothing. Files are
removed only where gpuyard promises to survive that (ADR 52).
"""

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from tests.torture.inject import Call, Injector
from tests.torture.target import Target

NOTHING = "nothing to do it to"


class Fault:
    """`lasts` are the shortest and longest duration in seconds. `pick` is a number below 1 that chooses the victim."""

    lasts: tuple[float, float] = (0.0, 0.0)
    needs_mounts = False
    needs_injector = False

    def __init__(self, target: Target, pick: float) -> None:
        self.target, self.pick = target, pick

    def begin(self) -> str:
        """Do it, and return what was done, in a few words."""
        raise NotImplementedError

    def end(self) -> None:
        """Mend it."""

    def choose(self, role: str) -> int | None:
        pids = self.target.find(role)
        return pids[int(self.pick * len(pids))] if pids else None

    @property
    def injector(self) -> Injector:
        assert self.target.injector is not None
        return self.target.injector


def send(pid: int, signum: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
        return True
    return False


class Kill(Fault):
    """Signal every process of these roles once."""

    def __init__(self, target: Target, pick: float, *roles: str, signum: int = signal.SIGKILL) -> None:
        super().__init__(target, pick)
        self._roles, self._signum = roles, signum

    def begin(self) -> str:
        done = []
        for role in self._roles:
            pid = self.choose(role)
            if pid is None:
                continue
            if role == "keeper":
                self.target.happened.killed_keepers.add(pid)
            if role == "job":
                self.target.happened.killed_jobs.add(pid)
            if send(pid, self._signum):
                done.append(f"{role} {pid}")
        return ", ".join(done) or NOTHING


class Stop(Fault):
    """Stop a process, and let it continue."""

    lasts = (2.0, 14.0)

    def __init__(self, target: Target, pick: float, role: str) -> None:
        super().__init__(target, pick)
        self._role = role
        self._pid: int | None = None

    def begin(self) -> str:
        self._pid = self.choose(self._role)
        if self._pid is None or not send(self._pid, signal.SIGSTOP):
            return NOTHING
        return f"{self._role} {self._pid}"

    def end(self) -> None:
        if self._pid is not None:
            send(self._pid, signal.SIGCONT)


class Restart(Fault):
    def begin(self) -> str:
        done = self.target.gpuyard("daemon", "restart")
        return f"exit {done.status}: {(done.out or done.err).strip().splitlines()[:1]}"


HOLD_MUTEX = """
import os, pathlib, signal, sys
from gpuyard.ledger.ledger_mutex import hold_mutex
with hold_mutex(pathlib.Path(sys.argv[1]), 20):
    print("held", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


class StopMutexHolder(Fault):
    """A process that holds the ledger's mutex is stopped."""

    lasts = (2.0, 14.0)
    _process: "subprocess.Popen[str] | None" = None

    def begin(self) -> str:
        command = [sys.executable, "-c", HOLD_MUTEX, str(self.target.ledger)]
        self._process = subprocess.Popen(
            command, env=self.target.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        return f"process {self._process.pid}" if self._process.stdout.readline() else NOTHING

    def end(self) -> None:
        assert self._process is not None
        send(self._process.pid, signal.SIGCONT)
        self._process.communicate()


# Limits


class Limit(Fault):
    """Lower a soft limit of a process to a little above what it uses now."""

    lasts = (2.0, 10.0)

    def __init__(self, target: Target, pick: float, role: str, which: str) -> None:
        super().__init__(target, pick)
        self._role, self._which = role, which
        self._limit: int = getattr(resource, f"RLIMIT_{which.upper()}")
        self._before: tuple[int, tuple[int, int]] | None = None

    def begin(self) -> str:
        pid = self.choose(self._role)
        if pid is None:
            return NOTHING
        try:
            soft = self._soft(psutil.Process(pid))
            before = resource.prlimit(pid, self._limit)
            soft = soft if before[1] == resource.RLIM_INFINITY else min(soft, before[1])
            resource.prlimit(pid, self._limit, (soft, before[1]))
        except (psutil.Error, ProcessLookupError):
            return NOTHING
        self._before = (pid, before)
        return f"{self._role} {pid} to {soft}"

    def _soft(self, process: psutil.Process) -> int:
        if self._which == "nofile":
            return max(16, process.num_fds() + int(self.pick * 4))
        if self._which == "as":
            return int(process.memory_info().vms + self.pick * (8 << 20))
        journal = self.target.home / "journal"
        return 4096 if self._role == "daemon" else journal.stat().st_size + 60

    def end(self) -> None:
        if self._before is not None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self._before[0], self._limit, self._before[1])


class Inject(Fault):
    """Let calls of a process fail."""

    lasts = (1.0, 10.0)
    needs_injector = True

    def __init__(self, target: Target, pick: float, role: str, calls: Call, *errors: int) -> None:
        super().__init__(target, pick)
        self._role, self._calls, self._errors = role, calls, errors

    def begin(self) -> str:
        pid = self.choose(self._role)
        if pid is None:
            return NOTHING
        error = self._errors[int(self.pick * 97) % len(self._errors)]
        one_in = 1 + int(self.pick * 4)
        self.injector.fail(pid, self._calls, error, one_in)
        return f"{errno.errorcode[error]} in every {one_in}. call of {self._role} {pid}"

    def end(self) -> None:
        self.injector.mend()


class StepClock(Fault):
    """Step the wall clock of all processes by hours, and back."""

    lasts = (2.0, 10.0)
    needs_injector = True

    def __init__(self, target: Target, pick: float, sign: int) -> None:
        super().__init__(target, pick)
        self._seconds = sign * int(600 + pick * 48 * 3600)

    def begin(self) -> str:
        self.injector.clock.step(self._seconds)
        return f"by {self._seconds / 3600:+.1f} h"

    def end(self) -> None:
        self.injector.clock.step(-self._seconds)


class Suspend(Fault):
    """Let up to an hour pass on the clocks that go on while the machine is suspended. It is not taken back."""

    needs_injector = True

    def begin(self) -> str:
        seconds = int(60 + self.pick * 3600)
        self.injector.clock.suspend(seconds)
        self.target.happened.suspended.append(time.monotonic())
        return f"for {seconds} s"


# Disks


class FillDisk(Fault):
    lasts = (2.0, 10.0)
    needs_mounts = True

    def __init__(self, target: Target, pick: float, folder: str) -> None:
        super().__init__(target, pick)
        self._file = getattr(target, folder) / "filler"

    def begin(self) -> str:
        size, step = 0, 1 << 24
        with self._file.open("wb") as file:
            while step:
                try:
                    os.posix_fallocate(file.fileno(), size, step)
                    size += step
                except OSError:
                    step >>= 1
        return f"{self._file.parent} with {size >> 10} kB"

    def end(self) -> None:
        self._file.unlink(missing_ok=True)


class UseUpInodes(Fault):
    lasts = (2.0, 10.0)
    needs_mounts = True

    def __init__(self, target: Target, pick: float, folder: str) -> None:
        super().__init__(target, pick)
        self._folder = getattr(target, folder) / "fillers"

    def begin(self) -> str:
        number = 0
        with contextlib.suppress(OSError):
            self._folder.mkdir()
            for number in range(100_000):
                (self._folder / f"{number}").touch()
        return f"{self._folder.parent} with {number} files"

    def end(self) -> None:
        for name in self._names():
            os.unlink(self._folder / name)
        with contextlib.suppress(FileNotFoundError):
            self._folder.rmdir()

    def _names(self) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError):
            yield from os.listdir(self._folder)
