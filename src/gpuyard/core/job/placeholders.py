"""Placeholders such as {lr} in commands and variables: filled in for each job, and checked when they are submitted.

`{NAME}` is a placeholder, and `{{NAME}}` is the text {NAME}, as in Python. `{{{NAME}}}` is a value in braces. All other
braces are left alone: those of JSON and of awk programs with more than one word, `{}`, and the shell's `${NAME}`.
Commands of a single job have no placeholders, and none of this applies to them.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from gpuyard.errors import UserError


class ArrayElement(Struct, frozen=True, kw_only=True):
    """What distinguishes one job of a submission from the others."""

    index: int | None = None
    values: dict[str, str] = {}
    command: tuple[str, ...] | None = None


# The first name of an expression with three, two, or one pair of braces; the shell reads `${NAME}` itself.
_PLACEHOLDER = re.compile(r"\{\{\{(\w+)\}\}\}|\{(\{\w+\})\}|(?<!\$)\{(\w+)\}")
_SIMILAR = 0.5


def fill_in(arguments: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Replace placeholders in one pass: a value that looks like a placeholder is not replaced again. Names that are
    not in `values` stay as they are."""

    def replace(found: re.Match[str]) -> str:
        in_braces, literal, name = found.groups()
        if literal is not None:
            return str(literal)
        if in_braces is not None:
            return f"{{{values[in_braces]}}}" if in_braces in values else found[0]
        return values.get(name, found[0])

    return tuple(_PLACEHOLDER.sub(replace, each) if "{" in each else each for each in arguments)


def used_names(texts: Sequence[str]) -> list[str]:
    """Return the names of the placeholders, in order."""
    found = (match for text in texts if "{" in text for match in _PLACEHOLDER.finditer(text))
    return [match[1] or match[3] for match in found if match[2] is None]


def check_known(texts: Sequence[str], known: Collection[str], source: str) -> None:
    """Refuse a placeholder that nothing fills in. `source` is where values come from, such as "--sweep"."""
    unknown = next((name for name in used_names(texts) if name not in known), None)
    if unknown is None:
        return
    literal = f"write {{{{{unknown}}}}} for the text {{{unknown}}}"
    near = nearest(unknown, known)
    if near is None:
        names = ", ".join(map("{{{}}}".format, known))
        raise UserError(
            f"{{{unknown}}} is not a placeholder: {source} gives {names}",
            hint=f"{literal}, or give a value for it",
        )
    raise UserError(
        f"{{{unknown}}} is not a placeholder of {source}; did you mean {{{near}}}?", hint=f"change it, or {literal}"
    )


def check_used(texts: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a sweep over a value that no placeholder uses: its jobs would be alike."""
    used = used_names(texts)
    unused = next((name for name in names if name not in used), None)
    if unused is None:
        return
    near = nearest(unused, [name for name in used if name not in names])
    meant = "" if near is None else f"; did you mean {{{unused}}} instead of {{{near}}}?"
    raise UserError(
        f"no placeholder uses the values of --sweep {unused}{meant}",
        hint=f"write {{{unused}}} into the command, or --env {unused.upper()}={{{unused}}}",
    )


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is most like `name`, apart from capitals; None if none is similar."""
    folded = {each.casefold(): each for each in known}
    found = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=_SIMILAR)
    return folded[found[0]] if found else None
