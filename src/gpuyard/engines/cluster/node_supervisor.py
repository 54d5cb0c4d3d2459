"""The supervisor: what a site starts on a node for one element of a parcel. It is the parent of the element's program.

It is a program of its own, run as `command` says with the element's number, and uses the standard library alone: a node
need not have more. All that it reads and writes is in the parcel's folder, which the nodes share with the engine.

- `N.began` is made by whoever comes first. Who finds it there leaves, having run nothing: an element runs once.
- The program runs in a session of its own. No signal but SIGKILL ends the supervisor before it: what it is sent is
  passed on to all processes of that session, unless the site sends it to them itself.
- `N.lost` says that the engine has given the element up: then all of the session is killed, and nothing more is told.
  A folder that cannot be read says nothing.
- `N.ended` is written the moment the program has ended, as the site may end us the next; where the disk is full or the
  network away it is tried again for two minutes. Our status is the program's, so the site tells of it too.
- After two seconds the meter is started beside it (`cluster_node/usage_meter.py`), which needs our package's
  dependencies and may fail. What the program leaves behind it is the site's to end.

The program's environment is the one it was submitted with, but for what only the site can know (`environment_of`).
"""

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpuyard.engines.local import keeper

_CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from gpuyard.engines.cluster.node_supervisor import main; main()"
)
_METER = "import sys; sys.path.insert(0, sys.argv.pop(1)); from gpuyard.cluster_node.usage_meter import main; main()"
_ROOT = os.path.abspath(__file__).removesuffix("/gpuyard/engines/cluster/node_supervisor.py")
_METER_AFTER_S = 2.0
_LOOK_FOR_LOSS_S = 2.0
_TRY_AGAIN_S = 1.0
_PATIENCE_S = 120.0
_CANNOT_EXECUTE, _NOT_FOUND, _BY_SIGNAL = 126, 127, 128
_KILLED = _BY_SIGNAL + signal.SIGKILL
_LOST = 0
_NOT_FIRST = 75  # so that the site never says of what somebody else ran, or nobody, that it succeeded
# Whoever forks faster than this many rounds needs a cgroup, not a supervisor.
_MOST_ROUNDS = 50
# Not those that nobody can heed, those that tell of our own faults, and what is about our own child and our own files.
_PASSED_ON = signal.valid_signals() - {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
    signal.SIGTRAP, signal.SIGSYS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ,
}  # fmt: skip
# Slurm and Ray end a job by sending these to each of its processes, in any session: once is enough for the program.
_SENT_TO_ALL = {signal.SIGTERM, signal.SIGCONT}
_OF_SITE = ("SLURM_", "SLURMD_", "RAY_")
# They describe a job, and some are set for some jobs only: what is left of the submitter's would be taken for this
# one's. But for the one that says where Slurm is.
_OF_OTHER_JOBS = ("SLURM_", "SLURMD_")
_WHERE_SLURM_IS = "SLURM_CONF"
_DEVICES = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
)  # fmt: skip
_NO_DEVICES = ("", "-1", "none", "void", "NoDevFiles")


def command(folder: str) -> tuple[str, ...]:
    """The words that start the supervisor of an element of the parcel in that folder; its number is to follow."""
    return sys.executable, "-I", "-S", "-c", _CODE, _ROOT, os.path.abspath(folder)


def environment_of(told: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The program's, of the one it was submitted with and the supervisor's own.

    What the site says of the job and its devices holds. The submitter's device variables name devices of another
    machine, so they never hold, but for one that says that there are none, where the site says nothing. A TMPDIR that
    is not there is none.
    """
    sites = {name: value for name, value in own.items() if name.startswith(_OF_SITE) or name in (*_DEVICES, "TMPDIR")}
    names_devices = not sites.keys().isdisjoint(_DEVICES)
    environment = {
        name: value
        for name, value in told.items()
        if not (name.startswith(_OF_OTHER_JOBS) and name != _WHERE_SLURM_IS)
        and not (name in _DEVICES and (names_devices or value not in _NO_DEVICES))
        and not (name == "TMPDIR" and not os.path.isdir(value))
    }
    return {**environment, **sites}


class Supervisor:
    """Of one element, whose files begin with `path` and a dot."""

    def __init__(self, path: str, element: Mapping[str, Any], environment: dict[str, str]) -> None:
        self._path = path
        self._element = element
        self._environment = environment
        self._nowhere = keeper.open_above(2)
        self._wire, self._bell = _lay_wire()
        self._program = 0
        self._meter = 0
        self._site_reaches_all = any(name.startswith(_OF_SITE) and name != _WHERE_SLURM_IS for name in os.environ)

    def begin(self) -> bool:
        """False where somebody did before us, or never lets it begin; OSError where nobody can. What a full disk does
        not take of the file's content is left out: that it is there is what counts."""
        content = json.dumps(
            {"at": time.time(), "node": os.environ.get("SLURMD_NODENAME") or os.uname().nodename, "pid": os.getpid()}
        )
        try:
            began = os.open(f"{self._path}.began", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        with contextlib.suppress(OSError), open(began, "w", encoding="ascii") as file:
            file.write(content)
        return True

    def run(self) -> int:
        """The status to leave with."""
        try:
            self._program = self._start()
        except keeper.StartFailure as hindrance:
            self._tell_end(hindrance.word, None, None)
            return _NOT_FOUND if hindrance.word == "no-program" else _CANNOT_EXECUTE
        threading.Thread(target=self._watch_for_loss, daemon=True).start()
        status = self._wait()
        self._end_meter()
        return status

    def _start(self) -> int:
        each = self._element
        if each["folder"] is not None:
            with contextlib.suppress(OSError):  # the program finds out, and knows better what to say
                os.mkdir(each["folder"])
        words = tuple(each["command"])
        launch = (each["key"], False, words, self._environment, each["cwd"], each["log"], each["stdin"])
        try:
            return keeper.spawn(launch, None, self._nowhere)
        except ValueError:  # no system can be given half a character, or a zero byte
            raise keeper.StartFailure("not-executable") from None

    # While it runs

    def _wait(self) -> int:
        poll = select.poll()
        poll.register(self._wire, select.POLLIN)
        meter_at = time.monotonic() + _METER_AFTER_S
        while True:
            left_ms = None if self._meter else max(0.0, meter_at - time.monotonic()) * 1000
            if poll.poll(left_ms):
                for signum in os.read(self._wire, 4096):
                    self._heed(signum)
            else:
                self._meter = self._start_meter()
            pid, status, used = os.wait4(self._program, os.WNOHANG)
            if pid:
                return self._conclude(status, _to_mb(used.ru_maxrss))

    def _heed(self, signum: int) -> None:
        if signum == _LOST:
            _signal_session(self._program, signal.SIGKILL)
            os._exit(_KILLED)
        if signum in _PASSED_ON and not (self._site_reaches_all and signum in _SENT_TO_ALL):
            _signal_session(self._program, signum)

    def _watch_for_loss(self) -> None:
        """In a thread of its own: to ask a network that is away may take for ever."""
        while not os.path.exists(f"{self._path}.lost"):
            time.sleep(_LOOK_FOR_LOSS_S)
        os.write(self._bell, bytes([_LOST]))

    def _start_meter(self) -> int:
        """-1 where there can be none."""
        words = (sys.executable, "-E", "-P", "-c", _METER, _ROOT, str(self._program), f"{self._path}.usage")
        actions = [(os.POSIX_SPAWN_DUP2, self._nowhere, 0)]
        try:
            return os.posix_spawn(words[0], words, self._environment, file_actions=actions, setsigmask=())
        except OSError:
            return -1

    def _end_meter(self) -> None:
        if self._meter > 0:
            os.kill(self._meter, signal.SIGKILL)
            os.waitpid(self._meter, 0)

    # After its end

    def _conclude(self, wait_status: int, ram_mb: float) -> int:
        code = os.waitstatus_to_exitcode(wait_status)
        status = code if code >= 0 else _BY_SIGNAL - code
        self._tell_end(str(status), self._program, self._usage(ram_mb))
        return status

    def _usage(self, ram_mb: float) -> dict[str, Any]:
        """As the meter left it, who adds up what all processes hold but may miss a peak; and the system sees every peak
        of any one."""
        try:
            with open(f"{self._path}.usage", "rb") as file:
                usage = json.load(file)
        except (OSError, ValueError):
            usage = {}
        return {**usage, "ram_mb": max(ram_mb, usage.get("ram_mb") or 0.0)}

    def _tell_end(self, word: str, pid: int | None, usage: dict[str, Any] | None) -> None:
        content = json.dumps({"word": word, "pid": pid, "at": time.time(), "usage": usage})
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return _write_whole(f"{self._path}.ended", content)
            except OSError as error:
                if time.monotonic() >= until:
                    return _complain(f"{self._path}.ended cannot be written: {error.strerror}")
            time.sleep(_TRY_AGAIN_S)


# Files


def _load(folder: str, number: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The element, and the environment it was submitted with."""
    with open(f"{folder}/parcel.json", "rb") as file:
        parcel = json.load(file)
    element = parcel["elements"][number]
    told = {**parcel["environment"], **element["environment"]}
    return element, {name: value for name, value in told.items() if value is not None}


def _write_whole(path: str, content: str) -> None:
    draft = f"{path}.draft"
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _complain(text: str) -> None:
    """Where the site keeps what its jobs write."""
    with contextlib.suppress(OSError):
        os.write(2, os.fsencode(f"gpuyard: {text}\n"))


# Signals


def _lay_wire() -> tuple[int, int]:
    """Two ends of a pipe that tells the numbers of signals; none of them does anything else."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for signum in _PASSED_ON | {signal.SIGCHLD}:
        with contextlib.suppress(OSError):  # the C library keeps some to itself
            signal.signal(signum, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return reading, writing


def _signal_session(leader: int, signum: int) -> None:
    """Only while the leader has not been waited for: its number is its own until then. What cannot be dodged is sent
    until nobody new is found."""
    reached: set[int] = set()
    for _ in range(_MOST_ROUNDS if signum == signal.SIGKILL else 1):
        fresh = [pid for pid in _session(leader) if pid not in reached]
        for pid in fresh:
            with contextlib.suppress(OSError):
                os.kill(pid, signum)
        reached.update(fresh)
        if not fresh:
            return


def _session(leader: int) -> Sequence[int]:
    """The leader's process group, as a negative number, where the system does not list its processes."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return [-leader]
    return [pid for pid in map(int, filter(str.isdecimal, names)) if _session_of(pid) == leader]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _to_mb(max_rss: int) -> float:
    return max_rss / (1048576 if sys.platform == "darwin" else 1024)


def main() -> None:
    folder, number = sys.argv[1], int(sys.argv[2])
    try:
        element, told = _load(folder, number)
        supervisor = Supervisor(f"{folder}/{number}", element, environment_of(told, os.environ))
        is_first = supervisor.begin()
    except (OSError, ValueError, LookupError) as error:
        sys.exit(f"gpuyard: element {number} of the parcel in {folder} cannot begin: {error!r}")
    sys.exit(supervisor.run() if is_first else _NOT_FIRST)
