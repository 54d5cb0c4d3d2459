"""The program of a command line: words, or one quoted line as a shell would read it."""

import os
import sys

# A single argument with one of these is a line, unless it is the name of a program.
_SEPARATORS = " \t\n;&|<>"


def read_command(words: list[str], directory: str) -> list[str]:
    """Return the arguments of the program. One argument with spaces or shell operators in it is a command line, unless
    a file or a program on PATH has this name: a shell runs it if it has shell syntax, else it is split into words."""
    if len(words) != 1 or not any(char in words[0] for char in _SEPARATORS) or _is_program(words[0], directory):
        return words
    from gpuyard.core.job.command_line import SHELL, read_line
    from gpuyard.ui.cli.terminal import is_terminal, note

    command = read_line(words[0].strip())
    if command[:2] == SHELL and is_terminal(sys.stderr):
        note(f"gpuyard: {SHELL[0]} runs this line")
    return list(command)


def _is_program(name: str, directory: str) -> bool:
    if os.path.exists(os.path.join(directory, name)):
        return True
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return "/" not in name and any(os.path.exists(os.path.join(folder, name)) for folder in folders if folder)
