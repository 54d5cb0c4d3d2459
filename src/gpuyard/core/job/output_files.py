"""Names of the files for the output of a job, by the patterns of `--output` and `--error`.

A pattern has the placeholders of Slurm (`%j`, `%4a` for four digits) and those of commands (`{index}`, `{lr}`). The
names `job`, `array`, `index`, `name`, `attempt`, `user` and `host` are known for every job; a value of a sweep or a
table with the same name wins.
"""

import re
from collections.abc import Iterable, Mapping

from gpuyard.core.job.placeholders import ArrayElement
from gpuyard.errors import UserError

# As sbatch calls them.
_LETTERS = {"j": "job", "A": "array", "a": "index", "x": "name", "u": "user", "N": "host"}
_NAMES = ("job", "array", "index", "name", "attempt", "user", "host")
_PATTERN_PLACEHOLDER = re.compile(r"%(\d{0,2})(.?)|\{(\w+)\}", re.DOTALL)
_KNOWN = "%j or {job}, %A or {array}, %a or {index}, %x or {name}, {attempt}, %u or {user}, %N or {host}, %% for a %"


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
    """Refuse a pattern that names no file, has an unknown placeholder, or names the same file for several jobs.

    elements: the jobs of the submission; of an array, one of them."""
    _check_path(option, pattern, cwd)
    elements = list(elements)
    used = {(name or "", _LETTERS.get(letter, letter)) for _, letter, name in _PATTERN_PLACEHOLDER.findall(pattern)}
    used.discard(("", "%"))
    values = elements[0].values if elements else {}
    for name, own in used:
        _check_placeholder(option, name or own, values if name else {}, has_index=elements[0].index is not None)
    names = {name or own for name, own in used}
    if is_many and not _tells_apart(names, elements):
        raise UserError(
            f"all jobs would write to the same file: --{option} {pattern}",
            hint="put " + ("{index} or " if elements[0].index is not None else "") + "{job} into it",
        )


def names_host(pattern: str) -> bool:
    return any("host" in (name, _LETTERS.get(letter)) for _, letter, name in _PATTERN_PLACEHOLDER.findall(pattern))


def _check_path(option: str, pattern: str, cwd: str) -> None:
    if not pattern or pattern.endswith("/"):
        raise UserError(f"--{option} '{pattern}' names no file", hint=f"such as --{option} logs/%j.txt")
    if not pattern.isprintable():
        raise UserError(f"--{option} takes plain text", hint="remove characters that cannot be printed")
    if pattern.startswith("~"):
        raise UserError(f"--{option} {pattern}: only a shell replaces ~", hint='write it as "$HOME/…"')
    if not pattern.startswith("/") and not cwd.isprintable():
        raise UserError(
            f"--{option} starts in the job's folder, and the name of that is not plain text", hint="give a whole path"
        )


def _check_placeholder(option: str, name: str, values: Mapping[str, str], *, has_index: bool) -> None:
    if name in values or (name in _NAMES and (has_index or name != "index")):
        return
    if name == "index":
        raise UserError(f"--{option}: this job has no index", hint="only --array gives one; {job} is its id")
    shown = f"%{name}" if len(name) < 2 else f"{{{name}}}"
    raise UserError(
        f"--{option}: there is no placeholder {shown}", hint=", ".join([_KNOWN, *map("{{{}}}".format, values)])
    )


def _tells_apart(names: set[str], elements: list[ArrayElement]) -> bool:
    """Return whether each job gets a file of its own. An array has one element here, and differs by index and id."""
    values = names & set(elements[0].values)
    if "job" in names - values or ("index" in names - values and elements[0].index is not None):
        return True
    return len(elements) > 1 and len({tuple(each.values[name] for name in values) for each in elements}) == len(
        elements
    )
