"""Start the Python programs of a test by forking a process that has imported gpuyard already.

Importing costs a daemon 0.3 s of CPU and a command 0.15 s, which was a third of what the whole suite took. While
`preloaded()` is active, `subprocess` asks a small server, one per test process, to fork instead:

    the test ── the server (imported everything, one thread) ── the program

The program is a process of its own with the arguments, environment, folder and streams that the test gave it. What
differs from a start by exec: its parent is the server, and /proc/PID/cmdline is the server's. A program for which that
or the interpreter's own start matters is started by exec, as `_can_fork` decides. With GPUYARD_FULL=1 all of them are.
"""

import array
import atexit
import contextlib
import ctypes
import gc
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from io import TextIOWrapper
from typing import Any, TextIO

ALL_BY_EXEC = bool(os.environ.get("GPUYARD_FULL"))
_MODULES = ("gpuyard", "gpuyard.daemon")
# Variables that the interpreter and the linker read when a program starts. The server has read them already.
_INTERPRETER_PREFIXES = ("PYTHON", "LC_", "LANG", "LD_", "COV")
# Padding in the server's environment to hold that of a program, so that /proc/PID/environ is right.
_PADDING = {"GPUYARD_TEST_PADDING": "x" * 60_000}
# Taken before any test has changed it: the server outlives the test that starts it and must not depend on it.
_FIRST_ENVIRONMENT = dict(os.environ)
_HEADER = struct.Struct("!I")
_Popen = subprocess.Popen
_pidfd_open = getattr(os, "pidfd_open", None)  # tests may hide it


@contextlib.contextmanager
def preloaded() -> Iterator[None]:
    """Have `subprocess` fork Python programs from the server, as far as it can."""
    if ALL_BY_EXEC or _pidfd_open is None:
        yield
        return
    subprocess.Popen = _ForkedPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = _Popen  # type: ignore[misc]


# In the test process


class _Server:
    """The connection to this process's server; started at the first program."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._owner = os.getpid()
        self.name = f"gpuyard-test-programs-{self._owner}"
        command = [sys.executable, "-P", os.path.abspath(__file__), str(theirs.fileno()), self.name]
        environment = {name: value for name, value in _FIRST_ENVIRONMENT.items() if not name.startswith("GPUYARD_")}
        with theirs:
            self.process = _Popen(command, pass_fds=[theirs.fileno()], env={**environment, **_PADDING})
        self.interpreter = _interpreter_settings(_FIRST_ENVIRONMENT)

    def close(self) -> None:
        """End the server. The programs that it started go on. Does nothing in a fork of the test process."""
        if self._owner == os.getpid():
            self._channel.shutdown(socket.SHUT_RDWR)
            self._channel.close()
            self.process.wait()

    def spawn(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        return self._ask(request, streams)

    def reap(self, pid: int) -> int:
        """Wait for a program that has ended, and return its wait status."""
        return self._ask({"reap": pid})

    def _ask(self, request: Mapping[str, Any], streams: Sequence[int] = ()) -> int:
        with _one_at_a_time:
            _send(self._channel, request, streams)
            answer, _ = _receive(self._channel)
        return int(answer["number"])


_one_at_a_time = threading.Lock()
_servers: dict[int, _Server] = {}


def _server() -> _Server:
    pid = os.getpid()
    if pid not in _servers:
        _servers[pid] = server = _Server()
        atexit.register(server.close)
    return _servers[pid]


class _ForkedPopen(_Popen[Any]):
    """A Popen that lets the server fork the program, if it can be forked."""

    _pidfd: int | None = None

    def _execute_child(self, *arguments: Any) -> None:
        (
            args, executable, preexec_fn, close_fds, pass_fds, cwd, env, _startupinfo, _creationflags, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
            _restore_signals, gid, gids, uid, umask, start_new_session, process_group,
        ) = arguments  # fmt: skip
        plain = not (executable or preexec_fn or pass_fds or shell or gid or gids or uid) and umask == -1 and close_fds
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
        argv = [] if isinstance(args, str | bytes) else [os.fsdecode(argument) for argument in args]
        if not plain or process_group != -1 or not _can_fork(argv, environment):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        request = {
            "argv": argv,
            "environment": environment,
            "cwd": os.path.abspath(os.fsdecode(cwd) if cwd is not None else os.getcwd()),
            "new_session": bool(start_new_session),
            "server": _server().name,
        }
        streams = [own if own != -1 else number for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = _server().spawn(request, streams)
        self._child_created = True
        assert _pidfd_open is not None
        self._pidfd = _pidfd_open(self.pid)
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _wait(self, timeout: float | None) -> int:
        if self._pidfd is None:
            return int(super()._wait(timeout))  # type: ignore[misc]
        if self.returncode is None and not self._has_ended(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return int(self.returncode)

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._pidfd is None:
            status: int | None = super()._internal_poll(*arguments, **options)  # type: ignore[misc]
            return status
        if self.returncode is None:
            self._has_ended(0.0)
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        """Wait for the end, up to `timeout` seconds, and take the exit status."""
        assert self._pidfd is not None
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            return False
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(_server().reap(self.pid))
                os.close(self._pidfd)
        return True


def _can_fork(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    if len(argv) < 3 or argv[0] != sys.executable:
        return False
    is_known = (argv[1] == "-m" and argv[2] in _MODULES) or (argv[1] == "-c" and "sys.modules" not in argv[2])
    is_shown = "sim-job" in argv  # stands for a user's program: its command line is shown
    return is_known and not is_shown and _interpreter_settings(environment) == _server().interpreter


def _interpreter_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_INTERPRETER_PREFIXES)}


# Messages: a length, JSON, and the streams of a program as descriptors


def _send(channel: socket.socket, message: Mapping[str, Any], streams: Sequence[int] = ()) -> None:
    content = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))] if streams else []
    channel.sendmsg([_HEADER.pack(len(content))], rights)
    channel.sendall(content)


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a message and its descriptors. Raises EOFError once the other side is gone."""
    header, streams, _, _ = socket.recv_fds(channel, _HEADER.size, 3)
    if not header:
        raise EOFError
    (length,) = _HEADER.unpack(header)
    content = b""
    while len(content) < length:
        part = channel.recv(length - len(content))
        if not part:
            raise EOFError
        content += part
    message: dict[str, Any] = json.loads(content)
    return message, list(streams)


# In the server


def _serve(channel: socket.socket, listener: socket.socket) -> dict[str, Any]:
    """Fork a program per request. Returns its request in each program, and never in the server."""
    while True:
        ready, _, _ = select.select([channel, listener], [], [])
        if listener in ready:
            if (request := _fork_daemon(listener)) is not None:
                return request
            continue
        try:
            request, streams = _receive(channel)
        except EOFError:
            sys.exit()
        if "reap" in request:
            _send(channel, {"number": os.waitpid(request["reap"], 0)[1]})
            continue
        pid = os.fork()
        if pid == 0:
            _take_streams(streams)
            return request
        for stream in streams:
            os.close(stream)
        _send(channel, {"number": pid})


def _fork_daemon(listener: socket.socket) -> dict[str, Any] | None:
    """Fork a daemon that a command asks for, reparented to init. Return its request in the daemon, else None."""
    with listener.accept()[0] as connection:
        try:
            request, streams = _receive(connection)
        except (EOFError, OSError):  # a test killed the command
            return None
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            _send(connection, {"number": os.getpid()})
            _take_streams(streams)
            connection.detach()
            return request
        for stream in streams:
            os.close(stream)
        os.waitpid(child, 0)
    return None


def _take_streams(streams: Sequence[int]) -> None:
    """Make these descriptors the standard streams, with the encodings that the interpreter chose for the server's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = _opened(0, "r", sys.stdin)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _opened(1, "w", sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _opened(2, "w", sys.stderr)  # type: ignore[misc]
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=is_unbuffered)
    sys.stderr.reconfigure(line_buffering=True, write_through=is_unbuffered)


def _opened(number: int, mode: str, like: TextIO) -> TextIOWrapper:
    stream = open(number, mode, encoding=like.encoding, errors=like.errors, closefd=False)  # noqa: SIM115
    assert isinstance(stream, TextIOWrapper)
    return stream


def _run(request: Mapping[str, Any]) -> None:
    """Run the program and end as the interpreter does, without taking all modules apart (60 ms)."""
    status = 0
    try:
        _become(request)
    except SystemExit as end:
        status = _exit_status(end)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        status = -signal.SIGINT
    except BaseException:  # noqa: BLE001 - where the interpreter would print it
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # closed by the program
            try:
                stream.flush()
            except OSError:
                status = status or 120
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _exit_status(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1


def _become(request: Mapping[str, Any]) -> None:
    if request["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    _show_environment(request["environment"])
    time.tzset()
    os.chdir(request["cwd"])
    _have_daemons_forked(request["server"])
    argv = request["argv"]
    sys.orig_argv = argv
    if argv[1] == "-m":
        sys.argv = [argv[2], *argv[3:]]
        sys.path.insert(0, request["cwd"])
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
        return
    sys.argv = ["-c", *argv[3:]]
    sys.path.insert(0, "")
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    exec(compile(argv[2], "<string>", "exec"), main.__dict__)


def _have_daemons_forked(server: str) -> None:
    """Have the server fork the daemon that this program may start, too."""
    from gpuyard.client import autostart, paths
    from gpuyard.system.private_files import make_folder, open_own

    by_exec, usual = autostart._start, autostart.DAEMON

    def start(command: Sequence[str]) -> int:
        if tuple(command) != usual:
            return by_exec(command)
        make_folder(paths.state_folder())
        log, nothing = open_own(paths.log_path()), os.open(os.devnull, os.O_RDONLY)
        request = {
            "argv": [sys.executable, "-m", "gpuyard.daemon"],
            "environment": autostart._environment(),
            "cwd": "/",
            "new_session": False,
            "server": server,
        }
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{server}")
            _send(connection, request, [nothing, log, log])
            answer, _ = _receive(connection)
        os.close(log)
        os.close(nothing)
        return int(answer["number"])

    autostart._start = start


def _show_environment(environment: Mapping[str, str]) -> None:
    """Write the environment to where the kernel reads /proc/PID/environ; nothing else points there any more."""
    with open("/proc/self/stat", encoding="ascii") as stat:
        fields = stat.read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    content = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    assert len(content) <= end - start, "raise the padding of the server's environment"
    ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


def _import_everything() -> None:
    import gpuyard

    left_out = ("__main__", "gpuyard.engines.")
    for module in pkgutil.walk_packages(gpuyard.__path__, "gpuyard."):
        if not any(part in module.name for part in left_out):
            with contextlib.suppress(ImportError):  # an extra that is not installed
                __import__(module.name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own_channel, own_listener = socket.socket(fileno=int(sys.argv[1])), socket.socket(socket.AF_UNIX)
    own_listener.bind(f"\0{sys.argv[2]}")
    own_listener.listen()
    _import_everything()
    asked = _serve(own_channel, own_listener)
    own_channel.detach()
    own_listener.detach()
    _run(asked)
