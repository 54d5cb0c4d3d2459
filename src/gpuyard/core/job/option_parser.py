"""Parses the values of a submission's options as the table in `submit_options` says. UserError names the option."""

import functools
from collections.abc import Callable
from typing import Any

from gpuyard.core.job.submit_options import SUBMIT_OPTIONS, SubmitOption
from gpuyard.core.units import parse_duration, parse_size
from gpuyard.errors import UserError


class Options:
    """The options of one submission: `options["vram"]` is the parsed value, or its default. `name in options` is
    whether the option was given; None and False count as not given."""

    def __init__(self, given: dict[str, Any]) -> None:
        unknown = sorted(set(given) - set(SUBMIT_OPTIONS))
        if unknown:
            raise UserError(f"there is no option '{unknown[0]}'", hint="see `gpuyard submit --help`")
        self._values = {name: _parse(SUBMIT_OPTIONS[name], value) for name, value in given.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return self._values.get(name, False) is not False

    def __getitem__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        option = SUBMIT_OPTIONS[name]
        if option.default is not None:
            return _default(name)
        return False if option.kind == "flag" else [] if option.is_repeatable else None

    def given(self) -> list[SubmitOption]:
        return [SUBMIT_OPTIONS[name] for name in self._values if name in self]


@functools.cache
def _default(name: str) -> Any:
    option = SUBMIT_OPTIONS[name]
    return _parse(option, option.default)


def _parse(option: SubmitOption, value: Any) -> Any:
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


def _parse_whole(option: SubmitOption, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise UserError(f"--{option.name} takes a whole number, not '{text}'") from None
    least, most = option.least, option.most
    assert least is not None
    assert most is not None
    if not least <= value <= most:
        raise UserError(f"--{option.name} {value} is out of range", hint=f"give it from {least:,} to {most:,}")
    return value


def _parse_number(option: SubmitOption, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"--{option.name} takes a number, not '{text}'") from None
    if not 0 <= value < float("inf"):
        raise UserError(f"--{option.name} {text} is out of range", hint="give it 0 or more")
    return value


def _parse_size(option: SubmitOption, text: str) -> float:
    size = parse_size(text)
    if not 0 < size < float("inf") and not (size == 0 and option.least == 0):
        raise UserError(f"--{option.name} {text} is out of range", hint="give it at least 1M")
    return size


def _parse_time(option: SubmitOption, text: str) -> float:
    seconds = parse_duration(text)
    if seconds == 0 and option.least != 0:
        raise UserError(f"--{option.name} must be longer than 0 s", hint="write it as 30s, 10m or 4h")
    return seconds


def _parse_choice(option: SubmitOption, text: str) -> str:
    if text not in option.choices:
        raise UserError(f"--{option.name} cannot be '{text}'", hint=f"it can be {', '.join(option.choices)}")
    return text


def _parse_word(option: SubmitOption, text: str) -> str:
    if not text.isprintable() or any(letter in text for letter in " ,=") or len(text) > 100:
        raise UserError(f"--{option.name} takes a word without spaces, commas and equals signs, of at most 100 letters")
    return text


_PARSERS: dict[str, Callable[[SubmitOption, str], Any]] = {
    "whole": _parse_whole,
    "number": _parse_number,
    "size": _parse_size,
    "time": _parse_time,
    "choice": _parse_choice,
    "word": _parse_word,
}


def parse_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UserError("--env takes NAME=VALUE", hint="write it as --env LR=3e-4")  # the text may be a secret
    return name, value
