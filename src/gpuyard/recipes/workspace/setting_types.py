"""What the keys of a workspace take: each kind makes a value of a YAML node, or says what it would have taken."""

import math
import re
import shlex
import unicodedata
from collections.abc import Callable

import yaml

from gpuyard.core.units import parse_duration, parse_size
from gpuyard.errors import UserError
from gpuyard.recipes.workspace.yaml_reader import YamlMistake, items_of, pairs_of, text_of

# As the queue bounds it.
_MOST_PRIORITY = 1_000_000
# In bytes; a file's name has 255, and ours have parts of their own.
LONGEST_LABEL = 180
_WHOLE = re.compile(r"[+-]?\d{1,12}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_FOR_A_SHELL = re.compile(r"[|&;<>]+")


def text(node: yaml.Node) -> str:
    return text_of(node, "text")


def flag(node: yaml.Node) -> bool:
    takes = "true or false"
    value = _FLAGS.get(text_of(node, takes).lower())
    if value is None:
        raise YamlMistake(takes)
    return value


def whole(least: int, most: int | None = None) -> Callable[[yaml.Node], int]:
    takes = f"a whole number of {least} or more" if most is None else f"a whole number from {least} to {most}"

    def kind(node: yaml.Node) -> int:
        written = text_of(node, takes).strip()
        if not _WHOLE.fullmatch(written) or int(written) < least or (most is not None and int(written) > most):
            raise YamlMistake(takes)
        return int(written)

    return kind


priority = whole(-_MOST_PRIORITY, _MOST_PRIORITY)


def gpu_count(node: yaml.Node) -> int | None:
    """`None` for all of them."""
    if text_of(node, "`all` or a whole number of 1 or more").strip().lower() == "all":
        return None
    try:
        return whole(1)(node)
    except YamlMistake as wrong:
        raise YamlMistake(f"`all` or {wrong}") from None


def engine(node: yaml.Node) -> str | None:
    """`None` for the queue's own; whether there is one of that name is seen when it is used."""
    takes = "default, or the name of an engine: local, slurm, ray"
    name = text_of(node, takes).strip().lower()
    if not name.isidentifier():
        raise YamlMistake(takes)
    return None if name == "default" else name


def seconds(node: yaml.Node) -> float:
    takes = "a time such as 30, 30s or 4h"
    try:
        return parse_duration(text_of(node, takes))
    except UserError:
        raise YamlMistake(takes) from None


def some_seconds(node: yaml.Node) -> float:
    value = seconds(node)
    if value == 0:
        raise YamlMistake("a time of more than 0, such as 30, 30s or 4h")
    return value


def size_mb(node: yaml.Node) -> float:
    takes = "a size such as 8G, or a number of MB"
    try:
        value = parse_size(text_of(node, takes))
    except UserError:
        raise YamlMistake(takes) from None
    if not 0 < value < math.inf:
        raise YamlMistake(takes)
    return value


def choice(*names: str) -> Callable[[yaml.Node], str]:
    takes = f"{', '.join(names[:-1])} or {names[-1]}"

    def kind(node: yaml.Node) -> str:
        value = text_of(node, takes).strip().lower()
        if value not in names:
            raise YamlMistake(takes)
        return value

    return kind


def label(node: yaml.Node) -> str:
    """Something that files and sessions can be called by."""
    takes = f"a name of at most {LONGEST_LABEL} bytes in one line, without `/`"
    value = text_of(node, takes)
    if "/" in value or has_control_characters(value) or len(value.encode()) > LONGEST_LABEL:
        raise YamlMistake(takes)
    return value


def pattern(node: yaml.Node) -> str:
    """What the files of a folder are chosen by."""
    takes = "a pattern of file names, such as *.yml (`config_dir` is their folder)"
    value = text_of(node, takes)
    if "/" in value:
        raise YamlMistake(takes)
    return value


def variable(node: yaml.Node) -> str:
    takes = "the name of an environment variable"
    value = text_of(node, takes)
    if not _VARIABLE.fullmatch(value):
        raise YamlMistake(takes)
    return value


def environment(node: yaml.Node) -> dict[str, str]:
    """Values are text as it was written: `yes` stays `yes`, and `1e-3` stays `1e-3`."""
    takes = "names of environment variables with their values, each name once"
    if not isinstance(node, yaml.MappingNode):
        raise YamlMistake(takes)
    values: dict[str, str] = {}
    for name_node, name, value in pairs_of(node, takes):
        if not _VARIABLE.fullmatch(name) or name in values:
            raise YamlMistake(takes, name_node)
        values[name] = value
    return values


def command(node: yaml.Node) -> tuple[str, ...]:
    """A list of words, or text in the words that a shell would see; no shell ever sees it."""
    takes = "a command: a list of words, or text without `|`, `>` and the like ([sh, -c, TEXT] is for these)"
    words = items_of(node, takes) if isinstance(node, yaml.SequenceNode) else _split(text_of(node, takes), takes)
    if not words or not words[0]:
        raise YamlMistake(takes)
    return words


def _split(written: str, takes: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(written))
    except ValueError:
        raise YamlMistake(takes) from None
    if any(_FOR_A_SHELL.fullmatch(word) for word in words):
        raise YamlMistake(takes)
    return words


def has_control_characters(value: str) -> bool:
    """What would break a line, a table or a terminal."""
    return any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in value)
