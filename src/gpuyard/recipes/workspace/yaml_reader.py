"""Read hand-written YAML strictly: every mistake is reported with its file, line and key.

A file is composed into nodes, never constructed into objects, and only known keys are converted, from their text as
written. So no tag is ever executed, an alias costs nothing, and a name written `007` or `no` stays that text. An empty
value counts as not given.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from gpuyard.errors import UserError

# The C parser is about ten times faster, but PyYAML may be built without it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# PyYAML composes recursively and crashes on ten thousand nested brackets.
_DEEPEST = 100
_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "timestamp", "value", "seq", "map")
)
_NULL = "tag:yaml.org,2002:null"
# Similarity at which an unknown key counts as a typing mistake of a known one.
_MIN_SIMILARITY = 0.6

SettingType = Callable[[yaml.Node], Any]


class InvalidYamlValue(Exception):
    """A value that a key does not accept: the message is what it accepts. `node` is the wrong part, None for all."""

    def __init__(self, takes: str, node: yaml.Node | None = None) -> None:
        super().__init__(takes)
        self.node = node


class YamlValue(Struct, frozen=True, kw_only=True):
    """A key's value and its line."""

    value: Any
    line: int


class _Mistake(Struct, frozen=True, kw_only=True, order=True):
    line: int
    text: str
    hint: str | None = None


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise cannot_read(path, error) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 text", hint="save it as UTF-8") from None


def cannot_read(path: Path, error: OSError) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"there is no file {path}")
    return UserError(f"cannot read {path}: {error.strerror}")


def compose_first(text: str) -> yaml.Node | None:
    """Return the first document, or None if the text is empty. Raises YAMLError if it is not YAML."""
    _check_depth(text)
    return next(yaml.compose_all(text, Loader=_Loader), None)


def _check_depth(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem="it is nested too deeply", problem_mark=event.start_mark)


def compose_file(path: Path) -> yaml.Node | None:
    """Return the only document of a file. Raises UserError if the file cannot be read or is not YAML."""
    text = _read_text(path)
    try:
        _check_depth(text)
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
        return node
    except yaml.YAMLError as error:
        line, problem = _locate(error, text)
        hint = "indent with spaces, not with tabs" if _is_indented_with_tab(text, line) else None
        raise UserError(f"{path}:{line}: not YAML: {problem}", hint=hint) from error


def _is_indented_with_tab(text: str, line: int) -> bool:
    lines = text.splitlines()[line - 1 : line]
    return any("\t" in each[: len(each) - len(each.lstrip())] for each in lines)


def _locate(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    """Return the line and the description of a syntax error."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        return (mark.line + 1 if mark else 1), ", ".join(filter(None, (error.context, error.problem)))
    position = getattr(error, "position", 0)
    return text.count("\n", 0, position) + 1, getattr(error, "reason", str(error))


def read_mapping(node: yaml.Node | None, types: Mapping[str, SettingType], path: Path) -> dict[str, YamlValue]:
    """Return the values of a mapping by key. Raises one UserError that lists all mistakes by line."""
    if node is None or is_empty(node):
        return {}
    if not isinstance(node, yaml.MappingNode):
        what = f"expected keys with values, not {describe(node)}"
        raise UserError(f"{path}:{line_of(node)}: {what}", hint="write each as `key: value`")
    values: dict[str, YamlValue] = {}
    mistakes: list[_Mistake] = []
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        try:
            key = _key(key_node, types, seen)
            if not is_empty(value_node):
                values[key] = YamlValue(value=_value(key, value_node, types[key]), line=line_of(key_node))
        except _MistakeFound as found:
            mistakes.append(found.mistake)
    _raise_all(mistakes, path)
    return values


class _MistakeFound(Exception):
    def __init__(self, node: yaml.Node, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.mistake = _Mistake(line=line_of(node), text=text, hint=hint)


def _key(node: yaml.Node, types: Mapping[str, SettingType], seen: dict[str, int]) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _MistakeFound(node, f"{describe(node)} cannot be a key")
    key: str = node.value
    if key not in types:
        near = closest_key(key, types)
        hint = f"did you mean `{near}`?" if near else f"the keys are {', '.join(types)}"
        raise _MistakeFound(node, f"there is no key `{key}`", hint)
    if key in seen:
        raise _MistakeFound(node, f"`{key}` is given twice, first on line {seen[key]}", "keep one of them")
    seen[key] = line_of(node)
    return key


def _value(key: str, node: yaml.Node, convert: SettingType) -> Any:
    try:
        return convert(node)
    except InvalidYamlValue as wrong:
        place = wrong.node or node
        raise _MistakeFound(place, f"`{key}` takes {wrong}, not {describe(place)}") from None


def _raise_all(mistakes: list[_Mistake], path: Path) -> None:
    if len(mistakes) == 1:
        raise UserError(f"{path}:{mistakes[0].line}: {mistakes[0].text}", hint=mistakes[0].hint)
    if mistakes:
        lines = [
            f"{path}:{each.line}: {each.text}" + (f" ({each.hint})" if each.hint else "") for each in sorted(mistakes)
        ]
        raise UserError("\n".join(lines))


def closest_key(key: str, known: Mapping[str, Any], min_similarity: float = _MIN_SIMILARITY) -> str | None:
    """Return the known key that is most like `key`, or None if none is similar enough."""
    found = difflib.get_close_matches(key.lower().replace("-", "_"), list(known), n=1, cutoff=min_similarity)
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


def scalar_text(node: yaml.Node, takes: str) -> str:
    """Return a scalar's text as written. Raises InvalidYamlValue for other nodes and for unusable characters."""
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _PLAIN_TAGS or not _is_text(node.value):
        raise InvalidYamlValue(takes, node)
    text: str = node.value
    return text


def _is_text(value: str) -> bool:
    """YAML escapes can produce NUL and lone surrogates, which file names and environment variables cannot hold."""
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def list_texts(node: yaml.SequenceNode, takes: str) -> tuple[str, ...]:
    return tuple(scalar_text(item, takes) for item in node.value)


def mapping_pairs(node: yaml.MappingNode, takes: str) -> Iterator[tuple[yaml.Node, str, str]]:
    """Yield the node, the name and the value of each pair in a mapping of text to text."""
    for name, value in node.value:
        yield name, scalar_text(name, takes), "" if is_empty(value) else scalar_text(value, takes)
