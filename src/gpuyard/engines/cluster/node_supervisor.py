"""The supervisor: a site starts it on a node for one element of a submission. It is the parent of the program, and uses
the standard library alone.

- It runs what the engine wrote, or nothing: the submission must have the digest that the site passed on.
- The first supervisor creates `N.started`; a later one finds it and runs nothing. So an element runs once.
- No signal but SIGKILL ends it before its program: it forwards signals to all processes of the program's session and
  their descendants, unless the site signals them itself; that of `--signal` only to those that handle it.
- `N.lost` means that the engine has given up the element. Then the supervisor kills these processes and says so in
  `N.ended`. A folder that cannot be read means nothing.
- It writes `N.ended` as soon as the program has ended, because the site may end the supervisor next; if that fails, it
  tries again for 2 minutes. Its exit status is the program's, so the site reports it too.
- If a limit of the node keeps the program from starting, it says so in `N.ended` or, if it cannot, withdraws
  `N.started`, and exits with status 75: the queue tries the element again later."""

import contextlib
import hashlib
import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpuyard.engines.common.handled_signals import handles
from gpuyard.engines.common.log_cap import cut_if_over, watch_log
from gpuyard.engines.common.spawn_program import (
    BY_SIGNAL,
    NotBegun,
    SpawnSpec,
    StartFailure,
    exit_status,
    open_above,
    spawn,
)
from gpuyard.system.processes import python_command
from gpuyard.system.system_limits import passes
from gpuyard.system.wakeable_poll import open_signal_pipe
from gpuyard.system.write_files import write_atomically

_METER = "gpuyard.cluster_node.node_programs"
_METER_AFTER_S = 2.0
CHECK_LOST_EVERY_S = 2.0
_TRY_AGAIN_S = 1.0
_GIVE_UP_AFTER_S = 120.0
GIVEN_UP = "given-up"  # the last word on a program that was killed because of `N.lost`
_LOST = 0
NOT_BEGUN = 75  # not 0: the site must not report success for an element that we did not run
# Stopping a program that forks faster than this many rounds takes a cgroup.
_MOST_ROUNDS = 50
# Not those that cannot be caught, those of our own faults, and those about our own child and our own files.
_FORWARDED = signal.valid_signals() - {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
    signal.SIGTRAP, signal.SIGSYS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ,
}  # fmt: skip
# Slurm and Ray end a job by sending these to each of its processes, in any session: the program has them already.
_SENT_TO_ALL = {signal.SIGTERM, signal.SIGCONT}
_SITE_PREFIXES = ("SLURM_", "SLURMD_", "RAY_")
_SLURM_CONF = "SLURM_CONF"
_DEVICES = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
)  # fmt: skip
_NO_DEVICES = ("", "-1", "none", "void", "NoDevFiles")


def command(folder: str, digest: str) -> tuple[str, ...]:
    """Return the command that starts a supervisor for the submission in this folder; add the element's number."""
    return python_command(__name__, os.path.abspath(folder), digest, options=("-I", "-S"))


def digest_of(submission: bytes) -> str:
    return hashlib.sha256(submission).hexdigest()


def program_environment(submitted: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the program's environment, from the submitted one and the supervisor's own.

    - The site's variables about the job and its devices win. The submitter's own ones about a job of Slurm would be
      taken for this job's; the exception says where Slurm is.
    - The submitter's device variables name devices of another machine, so they are dropped, except for a value that
      means "no devices" if the site sets none. A submitted TMPDIR that does not exist here is dropped."""
    kept = (*_DEVICES, "TMPDIR")
    from_site = {name: value for name, value in own.items() if name.startswith(_SITE_PREFIXES) or name in kept}
    names_devices = not from_site.keys().isdisjoint(_DEVICES)
    environment = {
        name: value
        for name, value in submitted.items()
        if not (name.startswith(("SLURM_", "SLURMD_")) and name != _SLURM_CONF)
        and not (name in _DEVICES and (names_devices or value not in _NO_DEVICES))
        and not (name == "TMPDIR" and not os.path.isdir(value))
    }
    return {**environment, **from_site}


class Supervisor:
    """Runs one element. Its files are `path` with a suffix, such as `.started`."""

    def __init__(self, path: str, element: Mapping[str, Any], environment: dict[str, str]) -> None:
        self._path, self._element, self._environment = path, element, environment
        self._started_at, self._started = time.time(), time.monotonic()
        self._null = open_above(2)
        self._signal_pipe, self._signal_pipe_end = open_signal_pipe()
        for signum in _FORWARDED | {signal.SIGCHLD}:
            with contextlib.suppress(OSError):  # the C library reserves some
                signal.signal(signum, lambda *_: None)  # its number is written to the pipe
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._program = 0
        self._meter = 0
        self._meter_at = self._started + _METER_AFTER_S
        self._warn_at = math.inf if element["warn_after_s"] is None else self._started + element["warn_after_s"]
        self._warned_at: float | None = None
        self._site_reaches_all = any(name.startswith(_SITE_PREFIXES) and name != _SLURM_CONF for name in os.environ)

    def claim(self) -> bool:
        """Create `N.started`; only its existence counts. Return False if it exists. Raises OSError if that fails."""
        # The GPUs that the site gave, by its numbers: a program in a cgroup counts from 0.
        names = ("SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
        given = [os.environ.get(name, "") for name in names]
        content = json.dumps(
            {
                "at": self._started_at,
                "node": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
                "pid": os.getpid(),
                "gpus": next((gpus for gpus in given if gpus not in _NO_DEVICES), ""),
            }
        )
        try:
            started = os.open(f"{self._path}.started", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        with contextlib.suppress(OSError), open(started, "w", encoding="ascii") as file:
            file.write(content)
        return True

    def run(self) -> int:
        try:
            self._program = self._start()
        except NotBegun as failure:
            if not self._write_end(failure.word, None, None):
                with contextlib.suppress(OSError):
                    os.unlink(f"{self._path}.started")
            return NOT_BEGUN
        except StartFailure as failure:
            self._write_end(failure.word, None, None)
            return failure.status
        threading.Thread(target=self._watch_for_loss, daemon=True).start()
        capped = [(path, cap) for path, cap in self._element["outputs"] if cap]
        for each in capped:
            threading.Thread(target=watch_log, args=each, daemon=True).start()
        status = self._wait()
        if self._meter > 0:
            os.kill(self._meter, signal.SIGKILL)
            os.waitpid(self._meter, 0)
        for each in capped:
            with contextlib.suppress(OSError):
                cut_if_over(*each)
        return status

    def _start(self) -> int:
        element = self._element
        if element["folder"] is not None:
            with contextlib.suppress(OSError):  # the program notices, and has the better error message
                os.mkdir(element["folder"])
        outputs = tuple((path, cap) for path, cap in element["outputs"])
        # Limits and niceness are the site's.
        shell = None if element["umask"] is None else (element["umask"], None, dict[int, int]())
        command, relay = tuple(element["command"]), tuple(element["relay"])
        spec = SpawnSpec(command, self._environment, element["cwd"], outputs, element["stdin"], relay, shell=shell)
        try:
            return spawn(spec, None, self._null)
        except ValueError:  # an incomplete character or a zero byte cannot be passed to a program
            raise StartFailure("not-executable") from None

    def _wait(self) -> int:
        poll = select.poll()
        poll.register(self._signal_pipe, select.POLLIN)
        while True:
            left_s = max(0.0, min(self._meter_at, self._warn_at) - time.monotonic())
            if poll.poll(None if left_s == math.inf else left_s * 1000):
                for signum in os.read(self._signal_pipe, 4096):
                    self._handle_signal(signum)
            else:
                if time.monotonic() >= self._meter_at:
                    self._meter_at, self._meter = math.inf, self._start_meter()
                if time.monotonic() >= self._warn_at:
                    self._warn()
            pid, status, used = os.wait4(self._program, os.WNOHANG)
            if pid:
                ram_mb = used.ru_maxrss / (1048576 if sys.platform == "darwin" else 1024)
                self._write_end(str(exit_status(status)), self._program, self._usage(ram_mb))
                return exit_status(status)

    def _warn(self) -> None:
        """Signal the processes that handle this signal: it would end the others. Without any, try again later."""
        signum = self._element["warning"]
        handling = [pid for pid in _processes(self._program) if pid < 0 or handles(pid, signum)]
        _kill_each(handling, signum)
        self._warn_at = math.inf if handling else time.monotonic() + _TRY_AGAIN_S
        self._warned_at = self._now() if handling else None

    def _handle_signal(self, signum: int) -> None:
        if signum == _LOST:
            self._give_up()
        if signum == self._element["warning"]:
            if self._warned_at is None:
                self._warn()
        elif signum in _FORWARDED and not (self._site_reaches_all and signum in _SENT_TO_ALL):
            _signal_processes(self._program, signum)

    def _give_up(self) -> None:
        """Kill the program, write that it has ended, and exit. If it had ended by itself, that counts."""
        _signal_processes(self._program, signal.SIGKILL)
        _, status = os.waitpid(self._program, 0)
        word = str(exit_status(status)) if os.WIFEXITED(status) else GIVEN_UP
        self._write_end(word, self._program, None)
        os._exit(BY_SIGNAL + signal.SIGKILL)

    def _watch_for_loss(self) -> None:
        """Runs in a thread, because a network file system that is down may block forever."""
        while not os.path.exists(f"{self._path}.lost"):
            time.sleep(CHECK_LOST_EVERY_S)
        os.write(self._signal_pipe_end, bytes([_LOST]))

    def _start_meter(self) -> int:
        meter = python_command(_METER, "meter", str(self._program), f"{self._path}.usage", options=("-E", "-P"))
        actions = [(os.POSIX_SPAWN_DUP2, self._null, 0)]
        with contextlib.suppress(OSError):
            return os.posix_spawn(meter[0], meter, self._environment, file_actions=actions, setsigmask=())
        return -1

    def _now(self) -> float:
        """Not the time of day: this node's clock may have been set since the start."""
        return self._started_at + time.monotonic() - self._started

    def _usage(self, ram_mb: float) -> dict[str, Any]:
        """Return the meter's usage. It may miss a peak of RAM; `ram_mb` is that of the largest process alone."""
        try:
            with open(f"{self._path}.usage", "rb") as file:
                usage = json.load(file)
        except (OSError, ValueError):
            usage = {}
        return {**usage, "ram_mb": max(ram_mb, usage.get("ram_mb") or 0.0)}

    def _write_end(self, word: str, pid: int | None, usage: dict[str, Any] | None) -> bool:
        end = {"word": word, "pid": pid, "at": self._now(), "usage": usage, "warned_at": self._warned_at}
        until = time.monotonic() + _GIVE_UP_AFTER_S
        while True:
            try:
                write_atomically(f"{self._path}.ended", json.dumps(end).encode(), mode=0o600)
                return True
            except OSError as error:
                if time.monotonic() >= until:
                    with contextlib.suppress(OSError):  # on standard error, which the site keeps
                        os.write(2, os.fsencode(f"gpuyard: {self._path}.ended cannot be written: {error.strerror}\n"))
                    return False
            time.sleep(_TRY_AGAIN_S)


def _load(folder: str, digest: str, number: int) -> tuple[dict[str, Any], dict[str, str]]:
    with open(f"{folder}/submission.json", "rb") as file:
        content = file.read()
    if digest_of(content) != digest:
        raise ValueError("another process has changed submission.json since it was submitted")
    submission = json.loads(content)
    element = submission["elements"][number]
    environment = {**submission["environment"], **element["environment"]}
    return element, {name: value for name, value in environment.items() if value is not None}


def _signal_processes(leader: int, signum: int) -> None:
    """Signal all processes, until there are no new ones if to kill. Only before the leader is reaped: then its pid is
    its own."""
    reached: set[int] = set()
    for _ in range(_MOST_ROUNDS if signum == signal.SIGKILL else 1):
        new = [pid for pid in _processes(leader) if pid not in reached]
        _kill_each(new, signum)
        reached.update(new)
        if not new:
            return


def _kill_each(pids: Sequence[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signum)


def _processes(leader: int) -> Sequence[int]:
    """Return the processes of the session and their descendants; without /proc, the leader's group as a negative
    number."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return [-leader]
    parents: dict[int, int] = {}
    found: set[int] = set()
    for pid in map(int, filter(str.isdecimal, names)):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            _state, parent, _group, session = file.read().rpartition(b")")[2].split()[:4]
            parents[pid] = int(parent)
            if int(session) == leader:
                found.add(pid)
    new = found
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found = found | new
    return sorted(found)


def main() -> None:
    folder, digest, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
    try:
        element, environment = _load(folder, digest, number)
        supervisor = Supervisor(f"{folder}/{number}", element, program_environment(environment, os.environ))
        is_first = supervisor.claim()
    except (OSError, ValueError, LookupError) as error:
        text = f"gpuyard: element {number} of the submission in {folder} cannot start: {error!r}"
        if not (isinstance(error, OSError) and passes(error)):
            sys.exit(text)
        with contextlib.suppress(OSError):
            os.write(2, os.fsencode(f"{text}\n"))
        sys.exit(NOT_BEGUN)
    sys.exit(supervisor.run() if is_first else NOT_BEGUN)
