"""The types of a workspace's settings: each converts a YAML node to a value, or raises what the setting accepts."""

import math
import re
import shlex
import unicodedata
from collections.abc import Callable

import yaml

from gpuyard.core.units import parse_duration, parse_size
from gpuyard.errors import UserError
from gpuyard.recipes.workspace.yaml_reader import InvalidYamlValue, list_texts, mapping_pairs, scalar_text

# The queue's own limit.
_MOST_PRIORITY = 1_000_000
# In bytes: a file name may have 255, and the label is only a part of ours.
LONGEST_LABEL = 180
_WHOLE = re.compile(r"[+-]?\d{1,12}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_SHELL_OPERATOR = re.compile(r"[|&;<>]+")


def text(node: yaml.Node) -> str:
    return scalar_text(node, "text")


def flag(node: yaml.Node) -> bool:
    takes = "true or false"
    value = _FLAGS.get(scalar_text(node, takes).lower())
    if value is None:
        raise InvalidYamlValue(takes)
    return value


def whole(least: int, most: int | None = None) -> Callable[[yaml.Node], int]:
    takes = f"a whole number of {least} or more" if most is None else f"a whole number from {least} to {most}"

    def convert(node: yaml.Node) -> int:
        written = scalar_text(node, takes).strip()
        if not _WHOLE.fullmatch(written) or int(written) < least or (most is not None and int(written) > most):
            raise InvalidYamlValue(takes)
        return int(written)

    return convert


priority = whole(-_MOST_PRIORITY, _MOST_PRIORITY)


def gpu_count(node: yaml.Node) -> int | None:
    """Return the number, or None for all GPUs."""
    if scalar_text(node, "`all` or a whole number of 1 or more").strip().lower() == "all":
        return None
    try:
        return whole(1)(node)
    except InvalidYamlValue as wrong:
        raise InvalidYamlValue(f"`all` or {wrong}") from None


def engine(node: yaml.Node) -> str | None:
    """Return the name, or None for the queue's default. Whether the engine exists is checked on use."""
    takes = "default, or the name of an engine: local, slurm, ray"
    name = scalar_text(node, takes).strip().lower()
    if not name.isidentifier():
        raise InvalidYamlValue(takes)
    return None if name == "default" else name


def seconds(node: yaml.Node) -> float:
    takes = "a time such as 30, 30s or 4h"
    try:
        return parse_duration(scalar_text(node, takes))
    except UserError:
        raise InvalidYamlValue(takes) from None


def positive_seconds(node: yaml.Node) -> float:
    value = seconds(node)
    if value == 0:
        raise InvalidYamlValue("a time of more than 0, such as 30, 30s or 4h")
    return value


def size_mb(node: yaml.Node) -> float:
    takes = "a size such as 8G, or a number of MB"
    try:
        value = parse_size(scalar_text(node, takes))
    except UserError:
        raise InvalidYamlValue(takes) from None
    if not 0 < value < math.inf:
        raise InvalidYamlValue(takes)
    return value


def choice(*names: str) -> Callable[[yaml.Node], str]:
    takes = f"{', '.join(names[:-1])} or {names[-1]}"

    def convert(node: yaml.Node) -> str:
        value = scalar_text(node, takes).strip().lower()
        if value not in names:
            raise InvalidYamlValue(takes)
        return value

    return convert


def label(node: yaml.Node) -> str:
    """A name for files and sessions."""
    takes = f"a name of at most {LONGEST_LABEL} bytes in one line, without `/`"
    value = scalar_text(node, takes)
    if "/" in value or has_control_characters(value) or len(value.encode()) > LONGEST_LABEL:
        raise InvalidYamlValue(takes)
    return value


def pattern(node: yaml.Node) -> str:
    takes = "a pattern of file names, such as *.yml (`config_dir` is their folder)"
    value = scalar_text(node, takes)
    if "/" in value:
        raise InvalidYamlValue(takes)
    return value


def variable(node: yaml.Node) -> str:
    takes = "the name of an environment variable"
    value = scalar_text(node, takes)
    if not _VARIABLE.fullmatch(value):
        raise InvalidYamlValue(takes)
    return value


def environment(node: yaml.Node) -> dict[str, str]:
    """Return names and values. Values keep their text as written: `yes` stays `yes`, `1e-3` stays `1e-3`."""
    takes = "names of environment variables with their values, each name once"
    if not isinstance(node, yaml.MappingNode):
        raise InvalidYamlValue(takes)
    values: dict[str, str] = {}
    for name_node, name, value in mapping_pairs(node, takes):
        if not _VARIABLE.fullmatch(name) or name in values:
            raise InvalidYamlValue(takes, name_node)
        values[name] = value
    return values


def command(node: yaml.Node) -> tuple[str, ...]:
    """Return the arguments: a list as it is, or text split as a shell splits it. The command runs without a shell."""
    takes = "a command: a list of arguments, or text without `|`, `>` and the like (for these, use [sh, -c, TEXT])"
    arguments = (
        list_texts(node, takes) if isinstance(node, yaml.SequenceNode) else _split(scalar_text(node, takes), takes)
    )
    if not arguments or not arguments[0]:
        raise InvalidYamlValue(takes)
    return arguments


def _split(written: str, takes: str) -> tuple[str, ...]:
    try:
        arguments = tuple(shlex.split(written))
    except ValueError:
        raise InvalidYamlValue(takes) from None
    if any(_SHELL_OPERATOR.fullmatch(argument) for argument in arguments):
        raise InvalidYamlValue(takes)
    return arguments


def has_control_characters(value: str) -> bool:
    """Whether the text has characters that break a line, a table or a terminal."""
    return any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in value)
