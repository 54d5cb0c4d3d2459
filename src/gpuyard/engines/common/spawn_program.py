"""Starts a program in a session of its own, for keepers and for supervisors on cluster nodes. Standard library only."""

import contextlib
import errno
import os
import resource
import signal
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpuyard.system.system_limits import passes, remedy_of
from gpuyard.system.write_files import UnsafePathError, open_results

# The words by which keepers and supervisors report a program that has not begun, because of an error that passes.
_UNBEGUN = "unbegun"
RETURNED = "unbegun-returned"  # a launch of a slice that its keeper gave back
BEGAN = "began"
_FAILURES = {
    "process": "no program can be started",
    "log": "no log can be written",
    "journal": "the keeper's journal cannot be written",
    "lease": "the keeper cannot take over a lease",
    "directory": "its directory cannot be entered",
    "input": "its input cannot be read",
    "output": "its output file cannot be written",
    "program": "its program cannot be read",
}
# Files that the job itself names: other jobs need not wait for them, unless the system lacks something.
_OF_THE_JOB = frozenset({"directory", "input", "output", "program"})


def is_unbegun(word: str) -> bool:
    return word.partition("-")[0] == _UNBEGUN


def describe(word: str) -> tuple[str, str, bool]:
    """Return the text of such a word, its remedy, and whether it concerns this job's files only; empty for others."""
    _, what, name = (*word.split("-"), "", "")[:3]
    number = getattr(errno, name.upper(), None)
    if what not in _FAILURES or number is None:
        return "", "", False
    is_own = what in _OF_THE_JOB and number not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    return f"{_FAILURES[what]}: {os.strerror(number)}", remedy_of(OSError(number, "")) or "", is_own


LEASE_AT = 8
# The mode of a log that was created before its program begins. The sticky bit, which has no meaning on files, tells it
# from the empty log of a program that has begun.
UNBEGUN_LOG = 0o600 | stat.S_ISVTX
CANNOT_EXECUTE, NOT_FOUND, BY_SIGNAL = 126, 127, 128
EVERY_SIGNAL = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
# Why a program was not started, by the word for it in the journal.
START_FAILURES = {
    "no-directory": "the directory {} is missing, or cannot be entered",
    "no-program": "there is no program {}",
    "not-executable": "{} cannot be executed",
    "too-long": "the command with its environment is longer than the system allows",
    "no-log": "the log cannot be written",
    "no-output": "the output {} cannot be written",
    "unsafe-output": "the output {} cannot be written: it, or a link on its path, belongs to another user, or it is not"
    " a plain file",
    "no-stdin": "the input {} cannot be read",
    "stdin-is-pipe": "the input {} is a named pipe: a file is needed",
    "own-limits": "the limits (ulimit) of the shell that submitted it let no program start",
}


# What a program gets that differs from our own: umask, niceness (None: as ours), soft limits by their numbers.
ShellChange = tuple[int | None, int | None, dict[int, int]]


class SpawnSpec(NamedTuple):
    command: tuple[str, ...]
    environment: dict[str, str]
    directory: str
    # Paths with caps (0: the user's file), for standard output and error, if apart.
    outputs: tuple[tuple[str, int], ...]
    stdin: str  # empty: /dev/null
    relay: tuple[str, ...] = ()  # the start of a command that runs the program
    open_files: int | None = None  # the limit, if below ours
    shell: ShellChange | None = None
    cpus: tuple[int, ...] = ()  # that it may run on; none: any
    cgroup: str = ""  # the folder of one that it joins


class StartFailure(Exception):
    """A program was not started: `word` says why, a key of START_FAILURES, or an unbegun word if it is tried again."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word
        self.status = NOT_FOUND if word == "no-program" else CANNOT_EXECUTE  # the exit status, as in shells


class NotBegun(StartFailure):
    """A limit of the system kept the program from starting, by a word such as `unbegun-log-enospc`. Its log is as
    before."""

    def __init__(self, what: str, error: OSError) -> None:
        super().__init__(f"{_UNBEGUN}-{what}-{errno.errorcode.get(error.errno or 0, 'eio').lower()}")


def exit_status(wait_status: int) -> int:
    """Return the exit status as in shells: 128 + the number for a signal."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else BY_SIGNAL - code


def open_above(highest: int) -> int:
    """Open /dev/null until its number is above `highest`, so that later files never get a number that jobs use."""
    while True:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if null > highest:
            return null


def spawn(spec: SpawnSpec, lease: int | None, null: int) -> int:
    """Start the program as the leader of a new session, and return its pid. Changes our own directory to the program's.
    Raises StartFailure, and writes the reason to the program's log. Raises NotBegun and leaves no empty log if a limit
    of the system prevents the start."""
    opened: list[int] = []
    try:
        for path, cap in spec.outputs:
            opened.append(_open_log(path) if cap else _open_users_file(path, spec))
        log = opened[-1]
        _enter(spec.directory, log)
        stdin = _open_input(spec.stdin, null, log)
        if stdin != null:
            opened.append(stdin)
        path = _find(spec.command[0], spec.environment, log)
        return _execute(path, spec, (stdin, opened[0], log), lease)
    except NotBegun:
        for (path, cap), descriptor in zip(spec.outputs, opened, strict=False):
            with contextlib.suppress(OSError):
                if cap and not os.fstat(descriptor).st_size:
                    os.unlink(path)
        raise
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _open_log(path: str) -> int:
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(log).st_mode & stat.S_ISVTX:
            os.fchmod(log, 0o600)
        return log
    except OSError as error:
        raise (NotBegun("log", error) if passes(error) else StartFailure("no-log")) from None


def headline(job_id: str, attempt: str) -> str:
    """Return how the line begins that separates an attempt from what its output file held before."""
    return f"--- gpuyard: job {job_id}, attempt {attempt}, "


def _open_users_file(path: str, spec: SpawnSpec) -> int:
    """Open a file that the user named. If it has content, a line separates that from what follows."""
    environment = spec.environment
    try:
        with _with_umask(None if spec.shell is None else spec.shell[0]):
            file = open_results(path)
        if os.fstat(file).st_size:
            begins = headline(environment.get("GPUYARD_JOB_ID", "?"), environment.get("GPUYARD_ATTEMPT", "?"))
            end = "\n" if _is_within_a_line(file) else ""
            os.write(file, f"{end}{begins}{time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())
        return file
    except UnsafePathError:
        raise StartFailure("unsafe-output") from None
    except OSError as error:
        raise (NotBegun("output", error) if passes(error) else StartFailure("no-output")) from None


def _is_within_a_line(file: int) -> bool:
    """Return whether the file does not end with the end of a line. False if it cannot be read, or without /proc."""
    try:
        with open(f"/proc/self/fd/{file}", "rb") as reading:
            reading.seek(-1, os.SEEK_END)
            return reading.read(1) != b"\n"
    except OSError:
        return False


def _enter(directory: str, log: int) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise (NotBegun("directory", error) if passes(error) else _failure("no-directory", log, directory)) from None


def _open_input(path: str, null: int, log: int) -> int:
    """Open the standard input. Never a named pipe: all jobs would wait until another process writes to it."""
    if not path:
        return null
    try:
        stdin = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise (NotBegun("input", error) if passes(error) else _failure("no-stdin", log, path)) from None
    if stat.S_ISFIFO(os.fstat(stdin).st_mode):
        os.close(stdin)
        raise _failure("stdin-is-pipe", log, path)
    os.set_blocking(stdin, True)
    return stdin


def _find(name: str, environment: dict[str, str], log: int) -> str:
    """Find a program as shells do: by path, or on the job's PATH. Relative parts of PATH count from its directory."""
    folders = environment.get("PATH", os.defpath).split(":") if name else []
    found, passing = "", None
    for path in [name] if "/" in name else [f"{folder or '.'}/{name}" for folder in folders]:
        try:
            is_file = stat.S_ISREG(os.stat(path).st_mode)
        except OSError as error:
            passing = error if passes(error) else passing  # it hides whether there is one
        except ValueError:  # a zero byte
            continue
        else:
            if is_file and os.access(path, os.X_OK):
                return path
            found = found or path
    if found:
        raise _failure("not-executable", log, found)
    raise NotBegun("program", passing) if passing is not None else _failure("no-program", log, name)


def _execute(path: str, spec: SpawnSpec, streams: tuple[int, int, int], lease: int | None) -> int:
    log = streams[2]
    given = [*([] if lease is None else [(lease, LEASE_AT)]), *((each, target) for target, each in enumerate(streams))]
    by_shell = ("/bin/sh", path, *spec.command[1:])  # for a script without an interpreter line
    ways = [(path, spec.command), ("/bin/sh", by_shell)]
    if spec.relay:
        ways = [(spec.relay[0], (*spec.relay, path, *spec.command))]
    if spec.cgroup:
        # A shell that joins it and becomes the program: we must not be in there ourselves, and the first page of the
        # program has to be counted. A script without an interpreter line is run by the shell.
        join = ("/bin/sh", "-c", 'echo $$ > "$0"; exec "$@"', f"{spec.cgroup}/cgroup.procs")
        ways = [("/bin/sh", (*join, ways[0][0], *ways[0][1][1:]))]
    for program, arguments in ways:
        try:
            with _settings_of(spec):
                pid = spawn_in_session(program, arguments, spec.environment, given)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise _refusal(error, log, path, spec) from None
            continue
        if spec.shell is not None and spec.shell[1] is not None:
            # Also of processes that it may have started since. Our own niceness would have to be lowered again, which
            # only root may do.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PGRP, pid, spec.shell[1])
        return pid
    raise _failure("not-executable", log, path)


@contextlib.contextmanager
def _settings_of(spec: SpawnSpec) -> Iterator[None]:
    """Have the CPUs, the soft limits and the umask of a program in this block, which it inherits. A hard limit stays,
    and bounds its soft limit; files that are open stay so. What the system refuses stays as it is."""
    umask, _, limits = spec.shell or (None, None, {})
    if spec.open_files is not None and spec.open_files < resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
        limits = {**limits, resource.RLIMIT_NOFILE: spec.open_files}
    with contextlib.ExitStack() as undo:
        if spec.cpus and hasattr(os, "sched_setaffinity"):
            undo.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, spec.cpus)
        for number, soft in limits.items():
            before = resource.getrlimit(number)
            undo.callback(_set_limit, number, before)
            is_above = before[1] != resource.RLIM_INFINITY and (soft == resource.RLIM_INFINITY or soft > before[1])
            _set_limit(number, (before[1] if is_above else soft, before[1]))
        undo.enter_context(_with_umask(umask))
        yield


@contextlib.contextmanager
def _with_umask(umask: int | None) -> Iterator[None]:
    if umask is None:
        yield
        return
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


def _set_limit(number: int, limit: tuple[int, int]) -> None:
    with contextlib.suppress(OSError, ValueError):  # the system refuses it: the program has our limit
        resource.setrlimit(number, limit)


def spawn_in_session(
    path: str, arguments: tuple[str, ...], environment: Mapping[str, str], given: Sequence[tuple[int, int]]
) -> int:
    """Start a program in a session of its own. `given`: our descriptors and their numbers there, set in this order."""
    actions = [(os.POSIX_SPAWN_DUP2, source, target) for source, target in given]
    return os.posix_spawn(
        path, arguments, environment, file_actions=actions, setsid=True, setsigmask=(), setsigdef=EVERY_SIGNAL
    )


def _refusal(error: OSError, log: int, path: str, spec: SpawnSpec) -> StartFailure:
    own_limits = {} if spec.shell is None else spec.shell[2]
    can_stop_us = {resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_NPROC}
    if error.errno in (errno.EAGAIN, errno.ENOMEM) and not can_stop_us.isdisjoint(own_limits):
        return _failure("own-limits", log)
    if error.errno == errno.E2BIG:
        return _failure("too-long", log)
    if passes(error):
        # The program itself may be unreadable. All else concerns every job.
        return NotBegun("program" if error.errno == errno.EIO else "process", error)
    return _failure("not-executable", log, path, f": {error.strerror}")


def _failure(word: str, log: int, subject: str = "", detail: str = "") -> StartFailure:
    """Write the reason to the log, where people look first."""
    try:
        os.write(log, os.fsencode(f"gpuyard: {START_FAILURES[word].format(subject)}{detail}\n"))
    except OSError as error:
        return NotBegun("log", error) if passes(error) else StartFailure("no-log")
    return StartFailure(word)
