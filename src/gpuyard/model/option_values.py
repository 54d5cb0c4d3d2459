"""Parses the values of options as their table says: those of a submission, and of a command line. UserError names the
option."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.model.units import parse_duration, parse_size


class Options:
    """The options of one submission or command: `options["vram"]` is the parsed value, or its default. `name in
    options` is whether the option was given; None and False count as not given."""

    def __init__(self, given: Mapping[str, Any], table: Mapping[str, Option]) -> None:
        unknown = sorted(set(given) - set(table))
        if unknown:
            raise UserError(f"there is no option '{unknown[0]}'", hint="see `gpuyard submit --help`")
        self._table = table
        self._values = {name: _parse(table[name], value) for name, value in given.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return self._values.get(name, False) is not False

    def __getitem__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        option = self._table[name]
        if option.default is not None:
            return _parse_default(option)
        return False if option.is_flag else [] if option.is_repeatable else None


@functools.cache
def _parse_default(option: Option) -> Any:
    return _parse(option, option.default)


def _parse(option: Option, value: Any) -> Any:
    if option.kind == "flag":
        if not isinstance(value, bool):
            raise UserError(f"--{option.name} takes no value")
        return value
    if option.is_repeatable:
        values = value if isinstance(value, list) else [value]
        if any(isinstance(each, bool | list | dict | None) for each in values):
            raise UserError(f"--{option.name} takes a value, or a list of them")
        return [str(each) for each in values]
    if isinstance(value, bool | list | dict):
        raise UserError(f"--{option.name} takes one value")
    return str(value) if option.kind == "text" else _PARSERS[option.kind](option, str(value))


def _parse_number(option: Option, text: str) -> float:
    is_whole = option.kind == "whole"
    try:
        value = int(text) if is_whole else float(text)
    except ValueError:
        what, example = ("whole number", 4) if is_whole else ("number", 80)
        raise UserError(
            f"--{option.name} takes a {what}, not '{text}'", hint=f"write it as --{option.name} {example}"
        ) from None
    least, most = option.least, option.most
    if (least is not None and not value >= least) or (most is not None and not value <= most):
        hint = f"give it {least:,} or more" if most is None else f"give it from {least or 0:,} to {most:,}"
        raise UserError(f"--{option.name} {value if is_whole else text} is out of range", hint=hint)
    if not is_whole and not 0 <= value < float("inf"):
        raise UserError(f"--{option.name} {text} is out of range", hint="give it 0 or more")
    return value


def _parse_size(option: Option, text: str) -> float:
    size = parse_size(text)
    if not 0 < size < float("inf") and not (size == 0 and option.least == 0):
        raise UserError(f"--{option.name} {text} is out of range", hint=f"write it as --{option.name} 8G")
    return size


def _parse_time(option: Option, text: str) -> float:
    seconds = parse_duration(text)
    if seconds == 0 and option.least is None:
        raise UserError(f"--{option.name} must be longer than 0 s", hint="write it as 30s, 10m or 4h")
    if option.least is not None and seconds < option.least:
        raise UserError(f"--{option.name} is too short", hint=f"give it at least {option.least:g} s")
    return seconds


def _parse_choice(option: Option, text: str) -> str:
    if text not in option.choices:
        raise UserError(f"--{option.name} cannot be '{text}'", hint=f"it can be {', '.join(option.choices)}")
    return text


def _parse_word(option: Option, text: str) -> str:
    if not text.isprintable() or any(letter in text for letter in " ,=") or len(text) > 100:
        raise UserError(f"--{option.name} takes a word without spaces, commas and equals signs, of at most 100 letters")
    return text


_PARSERS: dict[str, Callable[[Option, str], Any]] = {
    "whole": _parse_number,
    "number": _parse_number,
    "size": _parse_size,
    "time": _parse_time,
    "choice": _parse_choice,
    "word": _parse_word,
}
