"""Commands as rows of lists carry them: cut, because each change of a list sends its rows again to every viewer."""

# About two lines of a wide terminal.
MOST_SHOWN = 240
_CUT = "…"


def short_command(command: str) -> tuple[str, bool]:
    """Return a command of at most 240 characters, and whether it was cut; it then ends with an ellipsis."""
    if len(command) <= MOST_SHOWN:
        return command, False
    return command[: MOST_SHOWN - len(_CUT)] + _CUT, True
