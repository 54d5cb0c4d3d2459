"""Placeholders of commands and variables (`{lr}`, `{index}`), and of `--output` and `--error`, which have those of
Slurm as well (`%j`, `%4a`). There the names of _NAMES are known for every job; a value of a sweep or a table with the
same name wins. Braces that name no placeholder stay as they are.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from gpuyard.errors import UserError


class ArrayElement(Struct, frozen=True, kw_only=True):
    """What distinguishes one job of a submission from the others."""

    index: int | None = None
    values: dict[str, str] = {}
    command: tuple[str, ...] | None = None


# The first name of an expression with three, two, or one pair of braces; the shell reads `${NAME}` itself.
_PLACEHOLDER = re.compile(r"\{\{\{(\w+)\}\}\}|\{(\{\w+\})\}|(?<!\$)\{(\w+)\}")


def fill_in(arguments: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Replace placeholders in `values` in one pass: a value that looks like a placeholder is not replaced again."""

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
    if near is not None:
        text = f"{{{unknown}}} is not a placeholder of {source}; did you mean {{{near}}}?"
        raise UserError(text, hint=f"change it, or {literal}")
    names = ", ".join(map("{{{}}}".format, known))
    text = f"{{{unknown}}} is not a placeholder: {source} gives {names}"
    raise UserError(text, hint=f"{literal}, or give a value for it")


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is most like `name`, apart from capitals; None if none is similar."""
    folded = {each.casefold(): each for each in known}
    found = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)
    return folded[found[0]] if found else None


# As sbatch calls them.
_LETTERS = {"j": "job", "A": "array", "a": "index", "x": "name", "u": "user", "N": "host"}
_NAMES = ("job", "array", "index", "name", "attempt", "user", "host")
_PATTERN_PLACEHOLDER = re.compile(r"%(\d{0,2})(.?)|\{(\w+)\}", re.DOTALL)


def fill_pattern(pattern: str, own: Mapping[str, str], values: Mapping[str, str]) -> str:
    """Return the path: `own` has a text for each name that is known for every job, `values` for those of the job."""

    def replace(found: re.Match[str]) -> str:
        digits, letter, name = found.groups()
        if name is not None:
            return values.get(name, own.get(name, found[0]))
        return "%" if letter == "%" else own[_LETTERS[letter]].zfill(int(digits or 0))

    # Values may contain bytes that are not UTF-8, as lone surrogates.
    return _PATTERN_PLACEHOLDER.sub(replace, pattern).encode(errors="replace").decode()


def check_pattern(option: str, pattern: str, cwd: str, elements: Iterable[ArrayElement], *, is_many: bool) -> None:
    """Refuse a pattern without a file, with an unknown placeholder, or with one file for several `elements`."""
    if not pattern or pattern.endswith("/"):
        raise UserError(f"--{option} '{pattern}' names no file", hint=f"such as --{option} logs/%j.txt")
    if not pattern.isprintable():
        raise UserError(f"--{option} takes plain text", hint="remove characters that cannot be printed")
    if pattern.startswith("~"):
        raise UserError(f"--{option} {pattern}: only a shell replaces ~", hint='write it as "$HOME/…"')
    if not pattern.startswith("/") and not cwd.isprintable():
        text = f"--{option} starts in the job's folder, and the name of that is not plain text"
        raise UserError(text, hint="give a whole path")
    elements = list(elements)
    has_index = elements[0].index is not None
    used = {(name or "", _LETTERS.get(letter, letter)) for _, letter, name in _PATTERN_PLACEHOLDER.findall(pattern)}
    used.discard(("", "%"))
    values = elements[0].values if elements else {}
    for name, own in used:
        _check_placeholder(option, name or own, values if name else {}, has_index=has_index)
    names = {name or own for name, own in used}
    varying = names & set(values)
    # An array has one element here, and differs by index and id.
    is_own = "job" in names - varying or ("index" in names - varying and has_index)
    different = {tuple(each.values[name] for name in varying) for each in elements}
    if is_many and not is_own and not len(elements) == len(different) > 1:
        raise UserError(
            f"all jobs would write to the same file: --{option} {pattern}",
            hint="put " + ("{index} or " if has_index else "") + "{job} into it",
        )


def names_host(pattern: str) -> bool:
    return any("host" in (name, _LETTERS.get(letter)) for _, letter, name in _PATTERN_PLACEHOLDER.findall(pattern))


def _check_placeholder(option: str, name: str, values: Mapping[str, str], *, has_index: bool) -> None:
    if name in values or (name in _NAMES and (has_index or name != "index")):
        return
    if name == "index":
        raise UserError(f"--{option}: this job has no index", hint="only --array gives one; {job} is its id")
    shown = f"%{name}" if len(name) < 2 else f"{{{name}}}"
    known = "%j or {job}, %A or {array}, %a or {index}, %x or {name}, {attempt}, %u or {user}, %N or {host}, %% for a %"
    hint = ", ".join([known, *map("{{{}}}".format, values)])
    raise UserError(f"--{option}: there is no placeholder {shown}", hint=hint)
