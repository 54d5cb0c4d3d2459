"""Starts a program in a session of its own, for the keeper and for supervisors on cluster nodes.

Uses the standard library alone, as both do.
"""

import errno
import os
import signal
import stat
from typing import NamedTuple

LEASE_AT = 8
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)  # temporary
_EVERY_SIGNAL = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


class SpawnSpec(NamedTuple):
    """`log` and `stdin` are paths; an empty `stdin` stands for /dev/null."""

    command: tuple[str, ...]
    environment: dict[str, str]
    directory: str
    log: str
    stdin: str


class StartFailure(Exception):
    """Why a program was not started: `word` is for the journal, `text` for the program's log."""

    def __init__(self, word: str, text: str = "") -> None:
        super().__init__(text)
        self.word = word


def open_above(highest: int) -> int:
    """Open /dev/null until its number is above `highest`, so that later files never get a number that jobs use."""
    while True:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if null > highest:
            return null


def spawn(spec: SpawnSpec, lease: int | None, null: int) -> int:
    """Start the program as the leader of a new session, and return its pid. Changes our own directory to the program's.

    Raises StartFailure, and writes the reason to the program's log.
    """
    log, stdin = _open_log(spec.log), null
    try:
        _enter(spec.directory, log)
        stdin = _open_input(spec.stdin, null, log)
        path = _find(spec.command[0], spec.environment, log)
        return _execute(path, spec.command, spec.environment, (log, stdin, lease))
    finally:
        for descriptor in {log, stdin} - {null}:
            os.close(descriptor)


def _open_log(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartFailure("unbegun" if error.errno in _TOO_MANY_FILES else "no-log") from None


def _enter(directory: str, log: int) -> None:
    try:
        os.chdir(directory)
    except OSError:
        raise _failure("no-directory", f"the directory {directory} is missing, or cannot be entered", log) from None


def _open_input(path: str, null: int, log: int) -> int:
    """Open the standard input. Never a named pipe: all jobs would wait until another process writes to it."""
    if not path:
        return null
    try:
        stdin = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno in _TOO_MANY_FILES:
            raise StartFailure("unbegun") from None
        raise _failure("no-stdin", f"the input {path} cannot be read", log) from None
    if stat.S_ISFIFO(os.fstat(stdin).st_mode):
        os.close(stdin)
        raise _failure("stdin-is-pipe", f"the input {path} is a named pipe: a file is needed", log)
    os.set_blocking(stdin, True)
    return stdin


def _find(name: str, environment: dict[str, str], log: int) -> str:
    """Find a program as shells do: by path, or on the job's PATH. Relative parts of PATH count from its directory."""
    folders = environment.get("PATH", os.defpath).split(":")
    candidates = [name] if "/" in name else [f"{folder or '.'}/{name}" for folder in folders]
    existing = [path for path in candidates if os.path.exists(path)] if name else []
    for path in existing:
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    if existing:
        raise _failure("not-executable", f"{existing[0]} cannot be executed", log)
    raise _failure("no-program", f"there is no program {name}", log)


def _execute(
    path: str, command: tuple[str, ...], environment: dict[str, str], descriptors: tuple[int, int, int | None]
) -> int:
    log, stdin, lease = descriptors
    given = [(stdin, 0), (log, 1), (log, 2)] if lease is None else [(lease, LEASE_AT), (stdin, 0), (log, 1), (log, 2)]
    actions = [(os.POSIX_SPAWN_DUP2, source, target) for source, target in given]
    by_shell = ("/bin/sh", ("/bin/sh", path, *command[1:]))  # for a script without an interpreter line
    for program, arguments in ((path, command), by_shell):
        try:
            return _spawn_in_session(program, arguments, environment, actions)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise _failure(*_why_not(path, error), log) from None
    raise _failure("not-executable", f"{path} cannot be executed", log)


def _spawn_in_session(
    path: str, command: tuple[str, ...], environment: dict[str, str], actions: list[tuple[int, int, int]]
) -> int:
    return os.posix_spawn(
        path, command, environment, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_EVERY_SIGNAL
    )


def _why_not(path: str, error: OSError) -> tuple[str, str]:
    if error.errno == errno.E2BIG:
        return "too-long", "the command with its environment is longer than the system allows"
    if error.errno in (errno.EAGAIN, errno.ENOMEM, *_TOO_MANY_FILES):
        return "no-process", f"the system refused another process: {error.strerror}"
    return "not-executable", f"{path} cannot be executed: {error.strerror}"


def _failure(word: str, text: str, log: int) -> StartFailure:
    """Write the reason to the log, where people look first."""
    try:
        os.write(log, os.fsencode(f"gpuyard: {text}\n"))
    except OSError:
        return StartFailure("no-log")
    return StartFailure(word, text)
