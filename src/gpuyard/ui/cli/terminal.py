"""Printing to a terminal or a pipe: colours, size, encoding; and paths as users type them."""

import os
import sys

from gpuyard.errors import UserError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, TextIO

    from gpuyard.model.machine_snapshot import Snapshot
    from gpuyard.ui.cli.text_table import Column, Line
    from gpuyard.ui.views import Frame

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_CODES = frozenset({"0", *STYLES.values()})


def is_terminal(stream: "TextIO") -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str | None) -> str:
    return styled(text, style) if is_terminal(sys.stdout) else text


def styled(text: str, style: str | None) -> str:
    return text if style is None or "NO_COLOR" in os.environ else f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def terminal_size() -> tuple[int | None, int | None]:
    """Return the columns and lines of standard output. A pipe has no limits, unless COLUMNS sets one."""
    return window_size(sys.stdout) if is_terminal(sys.stdout) else (_number("COLUMNS"), None)


def window_size(stream: "TextIO") -> tuple[int, int]:
    columns, lines = _number("COLUMNS"), _number("LINES")
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):  # a terminal that tells none
        return columns or 80, lines or 24
    return columns or size.columns or 80, lines or size.lines or 24


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) else None


def say(*lines: str) -> None:
    """Print lines without control characters, except for the colours of `paint`. Characters that the encoding of
    standard output lacks become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        shown = line if line.isprintable() else _without_controls(line)
        if not shown.isascii():
            from gpuyard.ui.cli.text_table import spell

            shown = spell(shown, encoding)
        sys.stdout.write(f"{shown}\n")


def note(text: str) -> None:
    """Print lines to standard error, without control characters. It escapes characters that its encoding lacks."""
    from gpuyard.model.printable_text import printable_lines

    sys.stderr.write(f"{printable_lines(text)}\n")
    sys.stderr.flush()


def tolerate_config_faults() -> None:
    """Use the defaults if the configuration cannot be read, and say so on standard error. For commands that show."""
    from gpuyard.system.user_directories import user_directory

    if os.path.exists(f"{user_directory('XDG_CONFIG_HOME', '~/.config')}/config.toml"):
        from gpuyard.config import load_config, tolerate_faults

        tolerate_faults(lambda error: note(f"warning: {error}"))
        load_config()


def _without_controls(line: str) -> str:
    """Return the line with escapes for control characters, except for ends of lines and the codes of `paint`."""
    from gpuyard.model.printable_text import printable_lines

    first, *others = line.split("\x1b[")
    parts = [printable_lines(first)]
    for part in others:
        code, _, rest = part.partition("m")
        is_ours = code in _CODES
        parts.append(f"\x1b[{code}m{printable_lines(rest)}" if is_ours else printable_lines(f"\x1b[{part}"))
    return "".join(parts)


def table_lines(
    columns: "Sequence[Column]", rows: "Sequence[Sequence[str]]", styles: "Sequence[dict[str, str | None]]" = ()
) -> list[str]:
    """Return a table for standard output; `styles` as in `lay_out_lines`."""
    from gpuyard.ui.cli.text_table import lay_out_lines

    return list(map(_painted, lay_out_lines(columns, rows, terminal_size()[0], styles=styles)))


def say_lines(lines: "Iterable[Line]") -> None:
    say(*map(_painted, lines))


def _painted(line: "Line") -> str:
    return "".join(paint(text, style) if text.strip() else text for text, style in line)


def say_json(value: "Any") -> None:
    import json

    sys.stdout.write(f"{json.dumps(value, indent=2)}\n")


def absolute(path: str) -> str:
    if not path:
        raise UserError("a path is empty", hint="name a folder, or leave the option out")
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise UserError("the current directory no longer exists", hint="change to another one") from None


def frame() -> "Frame":
    from gpuyard.ui.views import Frame

    return Frame(width=terminal_size()[0])


def pids_of(snapshot: "Snapshot") -> set[int]:
    return {process.pid for device in snapshot.devices for process in device.processes or ()}
