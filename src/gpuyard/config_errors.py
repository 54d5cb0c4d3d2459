"""What is wrong in the configuration file, in one line: its line, the key, and what the key takes."""

import difflib
import re
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin

from msgspec import Struct, ValidationError
from msgspec.structs import fields

_AT_LINE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_AT_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_TYPES = {
    "int": "a whole number", "float": "a number", "str": "text in quotes", "bool": "true or false",
    "array": "a list in brackets", "object": "a table of keys",
}  # fmt: skip


def explain_syntax(path: object, text: str, error: ValueError) -> str:
    """Return the line and its key. Never the value, which may be secret."""
    if isinstance(error, UnicodeDecodeError):
        line, byte = error.object[: error.start].count(b"\n") + 1, error.object[error.start]
        return f"{path}:{line}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8"
    lines = text.splitlines()
    place = _AT_LINE.search(str(error))
    number = int(place[1]) if place and place[1] else len(lines)
    said = _AT_LINE.sub("", str(error))
    twice = re.fullmatch(r"Cannot declare \((.*?),?\) twice", said)
    if twice:
        name = twice[1].replace("', '", ".").strip("'")
        first = _line_of(text, name.split("."))
        said = f"[{name}] is there a second time; add its keys to line {first}"
    else:
        key = lines[number - 1].partition("=")[0].strip() if 0 < number <= len(lines) else ""
        said = f"this is not valid TOML{f' at {key}' if key else ''}: {said[:1].lower()}{said[1:]}"
    return f"{path}:{number}: {said}"


def explain_value(path: object, text: str, config: type[Struct], error: ValidationError) -> str:
    at = _AT_PATH.search(str(error))
    said = _AT_PATH.sub("", str(error))
    parts = [part for part in re.sub(r"\[[^\]]*\]", "", at[1] if at else "").split(".") if part]
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`$", said, re.DOTALL)
    if unknown:
        known = [each.name for each in fields(_table(config, parts))]
        near = difflib.get_close_matches(unknown[1], known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
        where = f"[{'.'.join(parts)}] has no key" if parts else "there is no section or key"
        return f"{_place(path, text, [*parts, unknown[1]])}: {where} {unknown[1]}; {advice}"
    expected = re.fullmatch(r"Expected `([^`]*)`((?: [<>]=? \S+)?)(?:, got `([^`]*)`)?$", said)
    if expected:
        taken = " or ".join(_TYPES.get(each, each) for each in expected[1].split(" | ") if each != "null")
        got = _TYPES.get(expected[3] or "", expected[3])
        said = f"takes {taken}{expected[2]}{f', not {got}' if got else ''}"
    elif said.startswith("Invalid enum value"):
        said = f"takes {_choices(config, parts)}, not {said.removeprefix('Invalid enum value ')}"
    else:  # one of the checks of a section, which names its key first
        first = re.match(r"\w+", said)
        key = first[0] if first and first[0] in {each.name for each in fields(_table(config, parts))} else None
        return f"{_place(path, text, [*parts, *([key] if key else [])])}: [{'.'.join(parts)}] {said}"
    name = f"[{'.'.join(parts[:-1])}] {parts[-1]}" if parts[1:] else ".".join(parts)
    return f"{_place(path, text, parts)}: {name} {said}"


def _place(path: object, text: str, parts: list[str]) -> str:
    number = _line_of(text, parts)
    return f"{path}:{number}" if number else str(path)


def _line_of(text: str, parts: list[str]) -> int | None:
    """Return the line of this key or table, else that of the deepest table that contains it."""
    table: list[str] = []
    found, depth = None, 0
    for number, line in enumerate(text.splitlines(), 1):
        header, key = re.match(r"\s*\[\[?([^\]]+)\]", line), re.match(r"\s*([^\s=#\[][^=]*?)\s*=", line)
        if header:
            here = table = _split(header[1])
        elif key:
            here = [*table, *_split(key[1])]
        else:
            continue
        if len(here) > depth and here == parts[: len(here)]:
            found, depth = number, len(here)
    return found


def _split(name: str) -> list[str]:
    return [part.strip().strip("\"'") for part in name.split(".")]


def _table(config: type[Struct], parts: list[str]) -> type[Struct]:
    """Return the structure of a section; a section may also be a plain value."""
    kinds = _kinds(config, parts[0]) if parts else ()
    return next((each for each in kinds if isinstance(each, type) and issubclass(each, Struct)), config)


def _kinds(table: type[Struct], key: str) -> tuple[Any, ...]:
    kind = next((each.type for each in fields(table) if each.name == key), None)
    return (kind, *get_args(kind))


def _choices(config: type[Struct], parts: list[str]) -> str:
    for kind in _kinds(_table(config, parts), parts[-1]):
        if get_origin(kind) is Literal:
            return " or ".join(f"'{each}'" for each in get_args(kind))
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return " or ".join(f"'{each}'" for each in kind)
    return "another value"
