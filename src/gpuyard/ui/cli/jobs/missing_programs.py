"""Notices typing mistakes in a submitted command: a program or a script that is not there, or a unit after a space.

Jobs are accepted all the same, as a program may appear before they start. A submission imports this while the daemon
works on it; if nothing is missing, it looks for a few files and imports nothing else.
"""

import os

from gpuyard.errors import GpuyardError, UserError
from gpuyard.ui.cli.command_grammar import Answer, Typed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_BUILT_INTO_SHELLS = (".", "alias", "cd", "eval", "export", "module", "set", "source", "ulimit", "unset")
# The first argument of these with such an ending is a script.
_RUN_SCRIPTS = ("python", "ipython", "pypy", "bash", "sh", "zsh", "torchrun", "accelerate", "deepspeed", "Rscript")
_SCRIPTS = (".py", ".sh", ".bash", ".R", ".r")


def refuse_unit(typed: Typed, directory: str) -> None:
    """Refuse `--time-limit 5 min CMD`, where `min` would be the program."""
    unit, (option, value) = typed.arguments[0], next(reversed(typed.options.items()), ("", ""))
    is_number = isinstance(value, str) and value.replace(".", "", 1).isdecimal()
    if is_number and find_program(unit, directory, _path([])) is None:
        hint = f"write --{option} {value}{unit}"
        raise UserError(f"'{unit}' would be the program: a time or a size is one word", hint=hint)


def find_mistake(typed: Typed, body: Answer, directory: str) -> str | None:
    """Return what is missing, with the word that was probably meant. What another machine or a container runs is not
    looked for, nor what has placeholders, or a file that an earlier job may make."""
    if "image" in typed.options or typed.text("engine") not in (None, "local"):
        return None
    path = _path(body["options"].get("env", ()))
    has_all_files = not any(name.startswith("after") for name in typed.options)
    commands = [body["command"]] if body["command"] else _read_lines(body["list"])
    found = (_find_missing(words, directory, path, has_all_files=has_all_files) for words in commands)
    first = next(filter(None, found), None)
    if first is None or typed.text("engine"):
        return first
    from gpuyard.config import load_config

    try:
        return first if load_config().queue.engine == "local" else None
    except GpuyardError:  # the daemon keeps the settings that it read before
        return first


def find_program(name: str, directory: str, path: str) -> str | None:
    """Find a program as the job will: by path, or on PATH. Relative folders count from the job's directory."""
    for folder in [""] if "/" in name else path.split(os.pathsep):
        found = os.path.join(directory, folder, name)
        if os.access(found, os.X_OK) and os.path.isfile(found):
            return found
    return None


def _path(variables: "Iterable[str]") -> str:
    """Return PATH, also where it is among these variables, as NAME=VALUE."""
    given = [each[len("PATH=") :] for each in variables if each.startswith("PATH=")]
    return given[-1] if given else os.environ.get("PATH", os.defpath)


def _read_lines(text: str) -> "Iterator[Sequence[str]]":
    """Yield a line of a file of commands for each different beginning, without those that a shell runs."""
    from gpuyard.model.command_line import SHELL, read_line

    seen = set()
    for line in map(str.strip, text.split("\n")):
        start = tuple(line.split(None, 3)[:3])
        if start and start not in seen and not line.startswith("#"):
            seen.add(start)
            words = read_line(line)
            if words[:2] != SHELL:
                yield words


def _find_missing(command: "Sequence[str]", directory: str, path: str, *, has_all_files: bool) -> str | None:
    at = 0
    while at + 1 < len(command) and (command[at] == "env" or (at and "=" in command[at])):
        at += 1
    program, path = command[at], _path([f"PATH={path}", *command[1:at]])
    if "{" in program or program.startswith("-") or ("/" in program and not has_all_files):
        return None
    if find_program(program, directory, path) is None:
        return _describe_program(program, directory, path)
    if not has_all_files or os.path.basename(program).rstrip("0123456789.") not in _RUN_SCRIPTS:
        return None
    for word in command[at + 1 :]:
        is_code = word.startswith("-") and not word.startswith("--") and word.endswith(("c", "m"))
        if is_code or "{" in word:
            return None
        if word.endswith(_SCRIPTS) and " " not in word:
            is_there = os.path.exists(os.path.join(directory, word))
            return None if is_there else f"there is no script '{word}' in {directory}{_like_file(word, directory)}"
    return None


def _describe_program(name: str, directory: str, path: str) -> str:
    if os.path.isfile(os.path.join(directory, name)):
        runner = {".py": "python ", ".sh": "bash "}.get(os.path.splitext(name)[1])
        if "/" not in name:
            meant = f"{runner or './'}{name}"
            return f"there is no program '{name}' on PATH, but a file of this name; did you mean '{meant}'?"
        how = f"did you mean '{runner}{name}'?" if runner else f"`chmod +x {name}` makes it so"
        return f"'{name}' is not executable; {how}"
    if name in _BUILT_INTO_SHELLS:
        line = f"quote the whole line, as in '{name} … && python train.py'"
        return f"'{name}' is no program, but built into shells: {line}"
    if "/" in name:
        return f"there is no program '{name}' in {directory}{_like_file(name, directory)}"
    folders = (os.path.join(directory, folder) for folder in path.split(os.pathsep))
    return f"there is no program '{name}' on PATH{_like(name, {each for folder in folders for each in _list(folder)})}"


def _like_file(name: str, directory: str) -> str:
    folder, base = os.path.split(name)
    return _like(base, _list(os.path.join(directory, folder)), folder)


def _like(name: str, names: "Iterable[str]", folder: str = "") -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, names, n=1, cutoff=0.7)
    return f"; did you mean '{os.path.join(folder, near[0])}'?" if near else ""


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # PATH may name folders that do not exist
        return []
