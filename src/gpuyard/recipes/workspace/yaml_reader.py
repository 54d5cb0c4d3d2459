"""YAML that people write by hand, read with care: every mistake is told with its file, its line and its key.

Nothing is constructed: a file is composed into nodes, and only what is asked for is made into values, from the text as
it stands. So no tag is ever executed, an alias costs nothing, and `007` or `no` is still what was written where a name
is wanted. A value that is empty means that none was given.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from gpuyard.errors import UserError

# The parser in C is some ten times faster, where it was built.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# It composes recursively, and crashes on brackets in brackets by the ten thousand.
_DEEPEST = 100
_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "timestamp", "value", "seq", "map")
)
_NULL = "tag:yaml.org,2002:null"
# How alike two keys must be for one to be a slip of the other.
_ALIKE = 0.6

Kind = Callable[[yaml.Node], Any]


class YamlMistake(Exception):
    """A value that a key does not take: the message says what it does take. `node` is where, if not the whole value."""

    def __init__(self, takes: str, node: yaml.Node | None = None) -> None:
        super().__init__(takes)
        self.node = node


class YamlValue(Struct, frozen=True, kw_only=True):
    """A key's value, and the line it is on."""

    value: Any
    line: int


class _Mistake(Struct, frozen=True, kw_only=True, order=True):
    line: int
    text: str
    hint: str | None = None


def read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: this is not UTF-8 text", hint="save it as UTF-8") from None


def compose_first(text: str) -> yaml.Node | None:
    """The first document; `None` where there is nothing. YAMLError where it is no YAML."""
    _check_depth(text)
    return next(yaml.compose_all(text, Loader=_Loader), None)


def _check_depth(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem="it is nested too deeply", problem_mark=event.start_mark)


def compose_file(path: Path) -> yaml.Node | None:
    """All of a file, which is one document. UserError where it cannot be read, or is no YAML."""
    text = read_text(path)
    try:
        _check_depth(text)
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
        return node
    except yaml.YAMLError as error:
        line, problem = _place_of(error, text)
        hint = "indent with spaces, not with tabs" if _has_tab(text, line) else None
        raise UserError(f"{path}:{line}: this is not YAML: {problem}", hint=hint) from error


def _has_tab(text: str, line: int) -> bool:
    """Whether a tab is among what the line begins with."""
    lines = text.splitlines()[line - 1 : line]
    return any("\t" in each[: len(each) - len(each.lstrip())] for each in lines)


def _place_of(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        return (mark.line + 1 if mark else 1), ", ".join(filter(None, (error.context, error.problem)))
    position = getattr(error, "position", 0)
    return text.count("\n", 0, position) + 1, getattr(error, "reason", str(error))


def take(node: yaml.Node | None, kinds: Mapping[str, Kind], path: Path) -> dict[str, YamlValue]:
    """The values that a mapping gives, by key; whatever is wrong with it is told at once, the first line first."""
    if node is None or is_empty(node):
        return {}
    if not isinstance(node, yaml.MappingNode):
        what = f"this is {describe(node)}, and should be keys with values"
        raise UserError(f"{path}:{line_of(node)}: {what}", hint="write each as `key: value`")
    taken: dict[str, YamlValue] = {}
    mistakes: list[_Mistake] = []
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        try:
            key = _key(key_node, kinds, seen)
            if not is_empty(value_node):
                taken[key] = YamlValue(value=_value(key, value_node, kinds[key]), line=line_of(key_node))
        except _Refused as refused:
            mistakes.append(refused.mistake)
    _tell(mistakes, path)
    return taken


class _Refused(Exception):
    def __init__(self, node: yaml.Node, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.mistake = _Mistake(line=line_of(node), text=text, hint=hint)


def _key(node: yaml.Node, kinds: Mapping[str, Kind], seen: dict[str, int]) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _Refused(node, f"{describe(node)} cannot be a key")
    key: str = node.value
    if key not in kinds:
        near = nearest(key, kinds)
        hint = f"did you mean `{near}`?" if near else f"the keys are {', '.join(kinds)}"
        raise _Refused(node, f"there is no key `{key}`", hint)
    if key in seen:
        raise _Refused(node, f"`{key}` was given on line {seen[key]} already", "keep one of them")
    seen[key] = line_of(node)
    return key


def _value(key: str, node: yaml.Node, kind: Kind) -> Any:
    try:
        return kind(node)
    except YamlMistake as wrong:
        place = wrong.node or node
        raise _Refused(place, f"`{key}` takes {wrong}, not {describe(place)}") from None


def _tell(mistakes: list[_Mistake], path: Path) -> None:
    if len(mistakes) == 1:
        raise UserError(f"{path}:{mistakes[0].line}: {mistakes[0].text}", hint=mistakes[0].hint)
    if mistakes:
        lines = [f"{each.text} ({each.hint})" if each.hint else each.text for each in sorted(mistakes)]
        places = [f"{path}:{each.line}" for each in sorted(mistakes)]
        raise UserError("\n".join(f"{place}: {line}" for place, line in zip(places, lines, strict=True)))


def nearest(key: str, known: Mapping[str, Any], alike: float = _ALIKE) -> str | None:
    """The key that was probably meant."""
    found = difflib.get_close_matches(key.lower().replace("-", "_"), list(known), n=1, cutoff=alike)
    return found[0] if found else None


def line_of(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1


def is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and (node.tag == _NULL or not node.value.strip())


def describe(node: yaml.Node) -> str:
    if node.tag not in _PLAIN_TAGS:
        return f"a value with the tag {node.tag}"
    if isinstance(node, yaml.ScalarNode):
        text = node.value.encode(errors="backslashreplace").decode()
        text = text if len(text) <= 60 else f"{text[:59]}…"
        return f"'{text}'"
    return "a list" if isinstance(node, yaml.SequenceNode) else "keys with values"


def text_of(node: yaml.Node, takes: str) -> str:
    """A value's text, as it was written."""
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _PLAIN_TAGS or not _is_text(node.value):
        raise YamlMistake(takes, node)
    text: str = node.value
    return text


def _is_text(value: str) -> bool:
    """Escapes can write what no file name and no variable can hold: a zero, and half of a character."""
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def items_of(node: yaml.SequenceNode, takes: str) -> tuple[str, ...]:
    return tuple(text_of(item, takes) for item in node.value)


def pairs_of(node: yaml.MappingNode, takes: str) -> Iterator[tuple[yaml.Node, str, str]]:
    """The names and values of a mapping of text to text, each with its node."""
    for name, value in node.value:
        yield name, text_of(name, takes), "" if is_empty(value) else text_of(value, takes)
