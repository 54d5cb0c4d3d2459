"""Commands as users type them, read and written as a shell would."""

import re

from gpuyard.errors import UserError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

SHELL = ("/bin/sh", "-c")
# Characters that only a shell interprets; a line without any of them needs no shell. {lr} is a placeholder.
_FOR_A_SHELL = re.compile(r"[|&;<>()$`\\*?\[\]#~!\n]|\{(?!\w+\})|^\s*\w+=")
# Quotes, and blanks that are part of an argument; a line without any of them needs no shlex, which is slow.
_FOR_SHLEX = re.compile(r"""['"]|[^\S \t]""")
_OPTION = re.compile(r"--?[A-Za-z]")
_SETTING = re.compile(r"\+{0,2}[A-Za-z_][\w.@/-]*=")  # as Hydra and many others take them


def read_line(line: str) -> tuple[str, ...]:
    """Split a command line into arguments; a line with shell syntax becomes `/bin/sh -c LINE`."""
    if _FOR_A_SHELL.search(line):
        return (*SHELL, line)
    if not _FOR_SHLEX.search(line):
        return tuple(line.split())
    import shlex

    try:
        return tuple(shlex.split(line))
    except ValueError as error:
        raise UserError(f"'{line}' cannot be split into arguments: {error}", hint="close its quotes") from error


def is_change_of_arguments(words: "Sequence[str]") -> bool:
    """Return whether these words change arguments of a command, as `--lr 1e-3` or `lr=1e-3`, and name no program."""
    return bool(words) and (_OPTION.match(words[0]) or _SETTING.match(words[0])) is not None


def change_arguments(command: "Sequence[str]", words: "Sequence[str]") -> tuple[str, ...]:
    """Return the command with these arguments. An option or a setting that it has gets the new values, in place of as
    many words as it has values itself: in `--verbose data.csv`, a new `--verbose` leaves `data.csv` alone. Others are
    added."""
    changed, groups = list(command), list[list[str]]()  # each option with its values, and each setting alone
    for word in words:
        is_start = _OPTION.match(word) or (_SETTING.match(word) and not (groups and _OPTION.match(groups[-1][0])))
        if is_start or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    for group in groups:
        at = _find(changed, group[0])
        if at is None:
            changed += group
            continue
        taken, values = 0, 1 if "=" in group[0] else len(group) - 1
        if "=" in changed[at]:
            values = 0
        while taken < values and at + 1 + taken < len(changed) and not _OPTION.match(changed[at + 1 + taken]):
            taken += 1
        changed[at : at + 1 + taken] = group
    return tuple(changed)


def _find(command: "Sequence[str]", word: str) -> int | None:
    """Return where the command has this option or setting, whatever its value."""
    name = word.partition("=")[0]
    is_setting = not _OPTION.match(word)
    for at in range(len(command) - 1, 0, -1):
        own, equals, _ = command[at].partition("=")
        if own.lstrip("+") == name.lstrip("+") and bool(equals) >= is_setting:
            return at
    return None


def short_command(command: str) -> tuple[str, bool]:
    """Return a command of at most 240 characters, which then ends with an ellipsis, and whether it was cut."""
    return (command, False) if len(command) <= 240 else (f"{command[:239]}…", True)
