"""The commands in a line for a shell, each with the folder in which it runs.

`cd DIR` is followed at the beginning of the line and after `&&`, `;` or a newline, until the end of its parentheses.
After `||`, `|` and `&` the shell may not run it in the same process, or not at all: there it is ignored.
"""

import os
import re
import shlex
from collections.abc import Iterator

_OPERATORS, _BETWEEN = "();<>|&\n", "();|&\n"
# After these the next command runs in the same shell.
_GOES_ON = re.compile(r"(&&|[\n;()])+")
_EXPANDED = re.compile(r"[$`*?\[]")  # by the shell, which alone knows the name


def shell_commands(line: str, cwd: str) -> Iterator[tuple[list[str], str | None]]:
    """Yield the words of each command and its folder; None if the folder cannot be told."""
    outer: list[str | None] = []  # the folders of the parentheses around
    folder: str | None = cwd
    command: list[str] = []
    is_followed = True
    for word in (*_words(line), ";"):
        if not word or word[0] not in _BETWEEN or not set(word) <= set(_OPERATORS):
            command.append(word)
            continue
        if command:
            yield command, folder
            if is_followed and command[0] == "cd":
                folder = _changed(folder, command)
        command, is_followed = [], _GOES_ON.fullmatch(word) is not None
        for each in word:
            if each == "(":
                outer.append(folder)
            elif each == ")" and outer:
                folder = outer.pop()


def _changed(folder: str | None, command: list[str]) -> str | None:
    """Return the folder after a `cd`."""
    names = [word for word in command[1:] if word not in ("--", "-L", "-P")]
    name = os.path.expanduser(names[0] if names else "~")
    if name == "-" or _EXPANDED.search(name) or (folder is None and not os.path.isabs(name)):
        return None
    return os.path.join(folder or "/", name)


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split, lexer.commenters, lexer.whitespace = True, "", " \t\r"
    try:
        return list(lexer)
    except ValueError:  # a quote without its end
        return line.split()
