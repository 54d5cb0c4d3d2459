"""Text that others wrote, made safe to show; and names in natural order. Text of another user, of a driver or of a
cluster is made printable where it enters gpuyard, so that no value holds it raw.
"""

_ELLIPSIS = "…"
# Of a message of another program, as a part of ours.
LONGEST_MESSAGE = 300


def printable(text: str, longest: int | None = None) -> str:
    """Return the text on one line of at most `longest` characters, with escapes such as `\\x1b` for control characters,
    line separators, marks that change the direction of writing, and lone surrogates."""
    if text.isprintable() and (longest is None or len(text) <= longest):
        return text
    shown = "".join(map(_escaped, text if longest is None else text[: longest + 1]))
    return shown if longest is None or len(shown) <= longest else shown[: longest - len(_ELLIPSIS)] + _ELLIPSIS


def printable_lines(text: str) -> str:
    """Return a text of several lines with escapes for all unprintable characters but the ends of lines."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    if character.isspace() and character > "\x9f" and character not in "\u2028\u2029":
        return " "  # the spaces of other scripts
    return ascii(character)[1:-1]  # no codec: loading one fails when no file can be opened, and so would the log line


def natural_order(path: str) -> tuple[list[list[str | int]], str]:
    """Return a sort key in which digits count as numbers, folder by folder."""
    import re

    parts = [re.split(r"([0-9]+)", part) for part in path.split("/")]
    return [[int(text) if at % 2 else text for at, text in enumerate(part)] for part in parts], path
