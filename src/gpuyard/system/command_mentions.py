"""Whether a command, or a file that it names, contains a word: the name of a variable that the program reads."""

import errno
import itertools
import os
import re
import shlex
import shutil
import stat
import time
from collections.abc import Iterator, Sequence

from gpuyard.system.worker_threads import NoAnswerYet, WorkerThread

_OPERATORS = "();<>|&\n"
_hung: dict[str, float] = {}  # working folders, and until when


def mentions(word: str, command: Sequence[str], cwd: str, search_path: str | None = None) -> bool | None:
    """Return whether the command or one of the files in it contains the word; None if that cannot be told, as no such
    file is here, one cannot be read, or its disk does not answer. `search_path`: the PATH by which a program without a
    folder is found; None if it is not on this machine."""
    if any(word in each for each in command):
        return True
    if time.monotonic() < _hung.get(cwd, 0.0):
        return None
    worker: WorkerThread[bool | None] = WorkerThread("gpuyard-mentions")
    if not worker.start(lambda: _search(word, command, cwd, search_path)):
        return None
    try:
        return worker.finish(5.0)
    except NoAnswerYet:  # a network disk may hang: nothing is read for a minute for commands of that working folder
        _hung[cwd] = time.monotonic() + 60.0
        return None


def _search(word: str, command: Sequence[str], cwd: str, search_path: str | None) -> bool | None:
    # The text of a shell, for example, is no name of a file.
    no_file = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO}
    is_unknown, files = False, 0
    for path in dict.fromkeys(_named_files(command, cwd, search_path)):
        if path is None:
            is_unknown = True
            continue
        try:
            content = _read(path)
        except ValueError:  # no name of a file
            continue
        except OSError as error:
            is_unknown = is_unknown or error.errno not in no_file
            continue
        if word.encode() in content:
            return True
        files += 1
        if files == 16:
            break
    return None if is_unknown or not files else False


def _named_files(command: Sequence[str], cwd: str, search_path: str | None) -> Iterator[str | None]:
    """Yield where files may be that the command names: the program, its arguments, a module of Python, and
    those that a line of a shell among its arguments names; None for those in a folder that cannot be told."""
    if command and "/" not in command[0] and search_path is not None:
        yield from filter(None, [shutil.which(command[0], path=search_path)])
    for place, each in enumerate(command):
        if "/" in each or (place and not each.startswith("-")):
            yield os.path.join(cwd, each)
        if place and command[place - 1] == "-m":
            module = os.path.join(cwd, *each.split("."))
            yield from (f"{module}.py", f"{module}/__main__.py")
        commands = _shell_commands(each)
        if commands != [[each]]:
            yield from _named_in_line(commands, cwd, search_path)


def _named_in_line(commands: list[list[str]], cwd: str, search_path: str | None) -> Iterator[str | None]:
    """Yield the same for the commands in a line for a shell, which may run in any folder that a `cd` before names."""
    folders = [cwd]
    for words in commands:
        for folder in folders:
            yield from _named_files(words, folder, search_path)
        if words[0] == "cd":
            name = next((word for word in words[1:] if word not in ("--", "-L", "-P")), "~")
            if name == "-" or re.search(r"[$`*?\[]", name):  # expanded by the shell, which alone knows the name
                yield None
            else:
                folders.append(os.path.join(folders[-1], os.path.expanduser(name)))


def _shell_commands(line: str) -> list[list[str]]:
    """Return the words of each command in a line for a shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split, lexer.commenters, lexer.whitespace = True, "", " \t\r"
    try:
        words = list(lexer)
    except ValueError:  # a quote without its end
        words = line.split()
    parts = itertools.groupby(words, lambda word: bool(word) and set(word) <= set(_OPERATORS))
    return [list(command) for is_operator, command in parts if not is_operator]


def _read(path: str) -> bytes:
    """Return the beginning of a file: a script that reads a variable names it there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(errno.ENOENT, "it is not a plain file", path)
        return os.read(descriptor, 1 << 20)
    finally:
        os.close(descriptor)
