"""The keeper: the parent of a daemon's jobs. It starts them, waits for them, and outlives the daemon.

It is a program of its own, run as `python -I -S keeper.py FOLDER`, with the standard library alone, so that it starts
at once and stays small. Descriptor 3 is the connection to the daemon that made it, 4 the journal.

- For each launch it writes to the journal that it begins, starts the program in a session of its own, and writes its
  status when it ends, a line each: `17.1 KEEPER began .`, `17.1 KEEPER 0 PID TIME .` The last also goes to every daemon
  that is connected. A line begins with a newline as another's may have been cut off by a full disk, and ends with a dot
  as its own may.
- It greets the daemon that made it when it can be found by others.
- What it was told by a daemon that has died is done before anybody else is heard. So one who connects later, at the
  socket KEEPER.sock in FOLDER, and is greeted, finds in the journal everything that was ever begun.
- It ends when its daemon is gone and so is its last job. No signal but SIGKILL ends it before.

A launch comes as its length in four bytes and a marshalled tuple. Leases' descriptors come along with the first byte of
a message that has some, and their number is the first thing in it.
"""

import errno
import marshal
import os
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable

CONNECTION, JOURNAL = 3, 4
LEASE_AT = 8
# KEY, whether there is a lease, program and arguments, environment, directory, log, input.
Launch = tuple[str, bool, tuple[str, ...], dict[str, str], str, str, str]

_CHUNK = 1 << 14
_MOST_DESCRIPTORS = 253
_TRY_AGAIN_MS = 1000
_EVERY_SIGNAL = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)  # for now
_BY_SIGNAL = 128
_CLOSED_IN_JOBS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class StartFailure(Exception):
    """Why a program was not started, in a word for the journal and in words for its log."""

    def __init__(self, word: str, text: str = "") -> None:
        super().__init__(text)
        self.word = word


def frame(part: Launch | int) -> bytes:
    """As it is sent to the keeper: a launch, or how many leases a message brings."""
    body = marshal.dumps(part)
    return len(body).to_bytes(4, "big") + body


class _Listener:
    """A daemon that is connected, and what it has not taken yet: nothing is left out, or it would wait forever."""

    def __init__(self, link: socket.socket) -> None:
        link.settimeout(0)
        self.link = link
        self.unsaid = bytearray()

    def say(self, line: bytes = b"") -> bool:
        """False where nobody is there any more; the journal tells the next one."""
        self.unsaid += line
        try:
            del self.unsaid[: self.link.send(self.unsaid)]
        except BlockingIOError:
            return True
        except OSError:
            self.unsaid.clear()
            return False
        return True


class Keeper:
    def __init__(self, folder: str) -> None:
        self._me = os.getpid()
        self._socket = f"{folder}/{self._me}.sock"
        self._daemon: _Listener | None = _Listener(socket.socket(fileno=CONNECTION))
        self._others: list[_Listener] = []
        self._unread = bytearray()
        self._arrived: list[list[int]] = []
        self._leases: list[int] = []
        self._jobs: dict[int, str] = {}
        self._unwritten: list[bytes] = []
        self._listener = _listen(folder, self._me)
        self._nowhere = open_above(LEASE_AT)
        self._wire = _lay_wire()
        self._poll = select.poll()
        self._ways: dict[int, Callable[[int], object]] = {}
        self._watch(self._wire, self._reap)
        self._watch(CONNECTION, self._attend)
        self._watch(self._listener.fileno(), self._greet)

    def run(self) -> None:
        self._greet_own()
        while self._daemon is not None or self._jobs or self._unwritten:
            for descriptor, event in self._poll.poll(_TRY_AGAIN_MS if self._unwritten else None):
                way = self._ways.get(descriptor)
                if way is not None:
                    way(event)
            if self._unwritten:
                self._write()
        os.unlink(self._socket)

    def _watch(self, descriptor: int, way: Callable[[int], object]) -> None:
        self._poll.register(descriptor, select.POLLIN)
        self._ways[descriptor] = way

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._ways[descriptor]

    # What the daemon says

    def _greet_own(self) -> None:
        if self._daemon is not None:
            self._say(self._daemon, _line("0.0", self._me, "hello"))

    def _attend(self, event: int) -> None:
        if event & select.POLLOUT and self._daemon is not None:
            self._say(self._daemon)
        if event & ~select.POLLOUT:
            self._hear()

    def _hear(self) -> bool:
        """Does what it says; false where there is nothing more to be heard now."""
        if self._daemon is None:
            return False
        space = socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS)
        try:
            news, told, flags, _ = self._daemon.link.recvmsg(_CHUNK, space, _CLOSED_IN_JOBS)
        except BlockingIOError:
            return False
        except ConnectionError:
            news, told, flags = b"", [], 0
        if told or flags & socket.MSG_CTRUNC:  # cut short where no more files can be opened
            self._arrived.append([number for _, _, content in told for number in _numbers(content)])
        self._unread += news
        self._take_launches()
        if not news:
            self._forget(CONNECTION)
            self._daemon.link.close()
            self._daemon = None
        return bool(news)

    def _take_launches(self) -> None:
        while len(self._unread) >= 4:
            end = 4 + int.from_bytes(self._unread[:4], "big")
            if len(self._unread) < end:
                return
            part: Launch | int = marshal.loads(self._unread[4:end])  # noqa: S302 - from our own daemon
            del self._unread[:end]
            if isinstance(part, int):
                self._leases = self._arrived.pop(0)
            else:
                self._start(part)

    def _start(self, launch: Launch) -> None:
        key, has_lease = launch[:2]
        lease = self._leases.pop(0) if has_lease and self._leases else None
        word = None
        try:
            self._write()  # an attempt that was unbegun before may come again: the last line on it has to be the newest
            if self._unwritten or (has_lease and lease is None):
                raise StartFailure("unbegun")
            if not self._try_to_write(_line(key, self._me, "began")):
                raise StartFailure("unbegun")
            self._jobs[spawn(launch, lease, self._nowhere)] = key
        except StartFailure as hindrance:
            word = hindrance.word
        if lease is not None:
            os.close(lease)
        if word is not None:  # told only when the lease is free, as of any other end
            self._tell(_line(key, self._me, word))

    def _greet(self, _: int) -> None:
        """Only once all that our own daemon said has been done."""
        while self._hear():
            pass
        try:
            link, _ = self._listener.accept()
        except OSError:  # no more files can be opened; the one who waits is greeted when they can
            return
        other = _Listener(link)
        self._others.append(other)
        self._watch(link.fileno(), lambda event: self._attend_other(other, event))
        self._say(other, _line("0.0", self._me, "hello"))

    def _attend_other(self, other: _Listener, event: int) -> None:
        """It has nothing to say: it takes what it is told, or is gone."""
        if event & ~select.POLLOUT:
            self._part_with(other)
        else:
            self._say(other)

    def _part_with(self, other: _Listener) -> None:
        self._forget(other.link.fileno())
        self._others.remove(other)
        other.link.close()

    # What becomes of the jobs

    def _reap(self, _: int) -> None:
        os.read(self._wire, 4096)
        while self._jobs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            key = self._jobs.pop(pid, None)
            if key is not None:
                code = os.waitstatus_to_exitcode(status)
                self._tell(_line(key, self._me, f"{code if code >= 0 else _BY_SIGNAL - code} {pid} {time.time():.3f}"))

    def _tell(self, line: bytes) -> None:
        self._unwritten.append(line)
        self._write()
        for listener in [self._daemon, *self._others]:
            if listener is not None:
                self._say(listener, line)

    def _write(self) -> None:
        while self._unwritten and self._try_to_write(self._unwritten[0]):
            del self._unwritten[0]

    @staticmethod
    def _try_to_write(line: bytes) -> bool:
        try:
            return os.write(JOURNAL, line) == len(line)
        except OSError:  # the disk is full
            return False

    def _say(self, listener: _Listener, line: bytes = b"") -> None:
        if not listener.say(line) and listener in self._others:
            self._part_with(listener)
        else:
            self._poll.modify(listener.link, select.POLLIN | (select.POLLOUT if listener.unsaid else 0))


def _numbers(content: bytes) -> list[int]:
    return memoryview(content[: len(content) // 4 * 4]).cast("i").tolist()


def _line(key: str, keeper: int, word: str) -> bytes:
    return f"\n{key} {keeper} {word} .\n".encode()


# One program


def spawn(launch: Launch, lease: int | None, nowhere: int) -> int:
    """The pid of the program, which leads a session of its own; its directory is ours from now on, too. Raises a
    Hindrance where it cannot be, which its log tells of."""
    _, _, command, environment, directory, log_path, stdin_path = launch
    log, stdin = _open_log(log_path), nowhere
    try:
        _enter(directory, log)
        stdin = _open_input(stdin_path, nowhere, log)
        return _execute(_find(command[0], environment, log), command, environment, (log, stdin, lease))
    finally:
        for descriptor in {log, stdin} - {nowhere}:
            os.close(descriptor)


def _open_log(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartFailure("unbegun" if error.errno in _NO_MORE_FILES else "no-log") from None


def _enter(directory: str, log: int) -> None:
    try:
        os.chdir(directory)
    except OSError:
        raise _hinder("no-directory", f"the directory {directory} is not there, or cannot be entered", log) from None


def _open_input(path: str, nowhere: int, log: int) -> int:
    """Never a named pipe: all jobs would wait until somebody writes to it."""
    if not path:
        return nowhere
    try:
        stdin = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno in _NO_MORE_FILES:
            raise StartFailure("unbegun") from None
        raise _hinder("no-stdin", f"the input {path} cannot be read", log) from None
    if stat.S_ISFIFO(os.fstat(stdin).st_mode):
        os.close(stdin)
        raise _hinder("stdin-is-pipe", f"the input {path} is a named pipe: a file is needed", log)
    os.set_blocking(stdin, True)
    return stdin


def _find(name: str, environment: dict[str, str], log: int) -> str:
    """As shells do: by its path, or on the job's PATH, whose relative places count from the job's directory."""
    places = environment.get("PATH", os.defpath).split(":")
    candidates = [name] if "/" in name else [f"{place or '.'}/{name}" for place in places]
    there = [path for path in candidates if os.path.exists(path)] if name else []
    for path in there:
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    if there:
        raise _hinder("not-executable", f"{there[0]} cannot be executed", log)
    raise _hinder("no-program", f"there is no program {name}", log)


def _execute(
    path: str, command: tuple[str, ...], environment: dict[str, str], descriptors: tuple[int, int, int | None]
) -> int:
    log, stdin, lease = descriptors
    given = [(stdin, 0), (log, 1), (log, 2)] if lease is None else [(lease, LEASE_AT), (stdin, 0), (log, 1), (log, 2)]
    actions = [(os.POSIX_SPAWN_DUP2, source, target) for source, target in given]
    by_shell = ("/bin/sh", ("/bin/sh", path, *command[1:]))  # a script that does not say what runs it
    for program, words in ((path, command), by_shell):
        try:
            return _spawn_in_session(program, words, environment, actions)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise _hinder(*_why_not(path, error), log) from None
    raise _hinder("not-executable", f"{path} cannot be executed", log)


def _spawn_in_session(
    path: str, command: tuple[str, ...], environment: dict[str, str], actions: list[tuple[int, int, int]]
) -> int:
    return os.posix_spawn(
        path, command, environment, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_EVERY_SIGNAL
    )


def _why_not(path: str, error: OSError) -> tuple[str, str]:
    if error.errno == errno.E2BIG:
        return "too-long", "the command with its environment is longer than the system allows"
    if error.errno in (errno.EAGAIN, errno.ENOMEM, *_NO_MORE_FILES):
        return "no-process", f"the system would not make another process: {error.strerror}"
    return "not-executable", f"{path} cannot be executed: {error.strerror}"


def _hinder(word: str, text: str, log: int) -> StartFailure:
    """The log is where a person looks first."""
    try:
        os.write(log, os.fsencode(f"gpuyard: {text}\n"))
    except OSError:
        return StartFailure("no-log")
    return StartFailure(word, text)


# The keeper's own


def open_above(least: int) -> int:
    """Nowhere, and nothing else opened from now on has a number up to `least`: jobs know things by those."""
    while True:
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if nowhere > least:
            return nowhere


def _lay_wire() -> int:
    """A descriptor that is readable when a child has ended."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def _listen(folder: str, me: int) -> socket.socket:
    """By a relative name: a socket's address has no room for a long path."""
    os.chdir(folder)
    name = f"{me}.sock"
    if os.path.lexists(name):
        os.unlink(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    listener.bind(name)
    os.umask(umask)
    listener.listen(8)
    return listener


def main() -> None:
    for descriptor in (CONNECTION, JOURNAL):
        os.set_inheritable(descriptor, False)  # noqa: FBT003
    for signum in _EVERY_SIGNAL - {signal.SIGCHLD}:
        signal.signal(signum, signal.SIG_IGN)
    Keeper(sys.argv[1]).run()


if __name__ == "__main__":
    main()
