"""Read hand-written YAML strictly, as settings of given types: every mistake is reported with its file, line and key.

A file is composed into nodes, never constructed into objects, and only known keys are converted, from their text as
written. So no tag is ever executed, an alias costs nothing, and a name written `007` or `no` stays that text. An empty
value counts as not given.
"""

import difflib
import math
import re
import shlex
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from gpuyard.core.job.job import RetryCause
from gpuyard.core.job.stop_warning import parse_warning
from gpuyard.core.snapshot import Vendor
from gpuyard.core.units import parse_duration, parse_size
from gpuyard.errors import UserError
from gpuyard.system.private_files import PrivateFileError, read_small

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
# The queue's own limit.
_MOST_PRIORITY = 1_000_000
# In bytes: a file name may have 255, and the label is only a part of ours.
LONGEST_LABEL = 180
_WHOLE = re.compile(r"[+-]?\d{1,12}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_SHELL_OPERATOR = re.compile(r"[|&;<>]+")

T = TypeVar("T")
SettingType = Callable[[yaml.Node], Any]


class InvalidYamlValue(Exception):
    """A value that a key does not accept: the message is what it accepts. `node` is the wrong part, None for all."""

    def __init__(self, takes: str, node: yaml.Node | None = None) -> None:
        super().__init__(takes)
        self.node = node


class _Mistake(Exception):
    def __init__(self, node: yaml.Node, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.line, self.text, self.hint = line_of(node), text, hint


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = read_small(file, str(path))
    except OSError as error:
        raise cannot_read(path, error) from error
    except PrivateFileError as error:
        raise UserError(str(error), hint=error.hint) from error
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
            mark: Any = event.start_mark  # the type stubs know two classes of marks, and accept only one here
            raise yaml.MarkedYAMLError(problem="it is nested too deeply", problem_mark=mark)


def compose_file(path: Path) -> yaml.Node | None:
    """Return the only document of a file. Raises UserError if the file cannot be read or is not YAML."""
    text = _read_text(path)
    try:
        _check_depth(text)
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
        return node
    except yaml.YAMLError as error:
        line, problem = _locate(error, text)
        is_indented_with_tab = re.match(r"\s*\t", "".join(text.splitlines()[line - 1 : line])) is not None
        hint = "indent with spaces, not with tabs" if is_indented_with_tab else None
        raise UserError(f"{path}:{line}: not YAML: {problem}", hint=hint) from error


def _locate(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    """Return the line and the description of a syntax error."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        return (mark.line + 1 if mark else 1), ", ".join(filter(None, (error.context, error.problem)))
    position = getattr(error, "position", 0)
    return text.count("\n", 0, position) + 1, getattr(error, "reason", str(error))


def read_mapping(node: yaml.Node | None, types: Mapping[str, SettingType], path: Path) -> dict[str, tuple[Any, int]]:
    """Return the value and the line of each key of a mapping. Raises one UserError that lists all mistakes by line."""
    if node is None or is_empty(node):
        return {}
    if not isinstance(node, yaml.MappingNode):
        what = f"expected keys with values, not {describe(node)}"
        raise UserError(f"{path}:{line_of(node)}: {what}", hint="write each as `key: value`")
    values: dict[str, tuple[Any, int]] = {}
    mistakes: list[_Mistake] = []
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        try:
            key = _key(key_node, types, seen)
            if not is_empty(value_node):
                values[key] = types[key](value_node), line_of(key_node)
        except InvalidYamlValue as wrong:
            place = wrong.node or value_node
            mistakes.append(_Mistake(place, f"`{key}` takes {wrong}, not {describe(place)}"))
        except _Mistake as found:
            mistakes.append(found)
    if len(mistakes) == 1:
        raise UserError(f"{path}:{mistakes[0].line}: {mistakes[0].text}", hint=mistakes[0].hint)
    if mistakes:
        mistakes.sort(key=lambda each: (each.line, each.text))
        hints = [f" ({each.hint})" if each.hint else "" for each in mistakes]
        lines = [f"{path}:{each.line}: {each.text}{hint}" for each, hint in zip(mistakes, hints, strict=True)]
        raise UserError("\n".join(lines))
    return values


def _key(node: yaml.Node, types: Mapping[str, SettingType], seen: dict[str, int]) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _Mistake(node, f"{describe(node)} cannot be a key")
    key: str = node.value
    if key not in types:
        near = closest_key(key, types)
        hint = f"did you mean `{near}`?" if near else f"the keys are {', '.join(types)}"
        raise _Mistake(node, f"there is no key `{key}`", hint)
    if key in seen:
        raise _Mistake(node, f"`{key}` is given twice, first on line {seen[key]}", "keep one of them")
    seen[key] = line_of(node)
    return key


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


def _scalar_text(node: yaml.Node, takes: str) -> str:
    """Return a scalar's text as written. Raises InvalidYamlValue for other nodes, and for NUL and lone surrogates: YAML
    escapes can produce them, but file names and environment variables cannot hold them."""
    is_plain = isinstance(node, yaml.ScalarNode) and node.tag in _PLAIN_TAGS
    if not is_plain or any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in node.value):
        raise InvalidYamlValue(takes, node)
    text: str = node.value
    return text


def has_control_characters(value: str) -> bool:
    """Whether the text has characters that break a line, a table or a terminal."""
    return any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in value)


def _scalar(
    takes: str, parse: Callable[[str], T], accepts: Callable[[T], object] = lambda _: True
) -> Callable[[yaml.Node], T]:
    """Return the type of a scalar. `parse` raises LookupError, ValueError or UserError for text that is not valid."""

    def convert(node: yaml.Node) -> T:
        written = _scalar_text(node, takes)
        try:
            value = parse(written)
        except (LookupError, ValueError, UserError):
            raise InvalidYamlValue(takes) from None
        if not accepts(value):
            raise InvalidYamlValue(takes)
        return value

    return convert


def _parse_word(written: str) -> str:
    return written.strip().lower()


def _parse_whole(written: str) -> int:
    if not _WHOLE.fullmatch(written.strip()):
        raise ValueError(written)
    return int(written)


def _parse_engine(written: str) -> str | None:
    name = _parse_word(written)
    if not name.isidentifier():
        raise ValueError(name)
    return None if name == "default" else name


def _parse_vendor(written: str) -> str | None:
    name = _parse_word(written)
    return None if name == "default" else Vendor(name).value


def _parse_stop_signal(written: str) -> str:
    parse_warning(written)
    return written


def _are_causes(written: str) -> bool:
    words = [word.strip() for word in written.split(",")]
    return set(words) <= set(RetryCause)


def whole(least: int) -> Callable[[yaml.Node], int]:
    return _scalar(f"a whole number of {least} or more", _parse_whole, lambda number: number >= least)


text = _scalar("text", str)
flag = _scalar("true or false", lambda written: _FLAGS[written.lower()])
priority = _scalar(
    f"a whole number from {-_MOST_PRIORITY} to {_MOST_PRIORITY}",
    _parse_whole,
    lambda number: abs(number) <= _MOST_PRIORITY,
)
# None for all GPUs.
gpu_count = _scalar(
    "`all` or a whole number of 0 or more",
    lambda written: None if _parse_word(written) == "all" else _parse_whole(written),
    lambda number: number is None or number >= 0,
)
no_gpu = _scalar("0, for work without a GPU (`gpus` is the number of a task's GPUs)", _parse_whole, (0).__eq__)
# None for the queue's default. Whether the engine exists is checked on use.
engine = _scalar("default, or the name of an engine: local, slurm, ray", _parse_engine)
vendor = _scalar(f"default, or a vendor of GPUs: {', '.join(Vendor)}", _parse_vendor)
sessions = _scalar("tmux or none", _parse_word, ("tmux", "none").__contains__)
retry_causes = _scalar(f"some of {', '.join(RetryCause)}", str, _are_causes)
stop_signal = _scalar("a signal and a time, such as USR1@5m", _parse_stop_signal)
seconds = _scalar("a time such as 30, 30s or 4h", parse_duration)
size_mb = _scalar("a size such as 8G, or a number of MB", parse_size, lambda size: 0 < size < math.inf)
function = _scalar("MODULE:FUNCTION, such as my_args:parse_config", str, _FUNCTION.fullmatch)
variable = _scalar("the name of an environment variable", str, _VARIABLE.fullmatch)
pattern = _scalar(
    "a pattern of file names, such as *.yml (`config_dir` is their folder)", str, lambda names: "/" not in names
)
# A name for files and sessions.
label = _scalar(
    f"a name of at most {LONGEST_LABEL} bytes in one line, without `/`",
    str,
    lambda name: "/" not in name and not has_control_characters(name) and len(name.encode()) <= LONGEST_LABEL,
)


def positive_seconds(node: yaml.Node) -> float:
    value = seconds(node)
    if value == 0:
        raise InvalidYamlValue("a time of more than 0, such as 30, 30s or 4h")
    return value


def environment(node: yaml.Node) -> dict[str, str]:
    """Return names and values. Values keep their text as written: `yes` stays `yes`, `1e-3` stays `1e-3`."""
    takes = "names of environment variables with their values, each name once"
    if not isinstance(node, yaml.MappingNode):
        raise InvalidYamlValue(takes)
    values: dict[str, str] = {}
    for name_node, value_node in node.value:
        name = _scalar_text(name_node, takes)
        value = "" if is_empty(value_node) else _scalar_text(value_node, takes)
        if not _VARIABLE.fullmatch(name) or name in values:
            raise InvalidYamlValue(takes, name_node)
        values[name] = value
    return values


def mounts(node: yaml.Node) -> tuple[str, ...]:
    """Return the mounts of a container: a list, or one text."""
    takes = "folders as for --mount, such as [/data/sets:/data:ro]"
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    found = tuple(_scalar_text(item, takes) for item in nodes)
    if not all(found):
        raise InvalidYamlValue(takes)
    return found


def command(node: yaml.Node) -> tuple[str, ...]:
    """Return the arguments: a list as it is, or text split as a shell splits it. The command runs without a shell."""
    takes = "a command: a list of arguments, or text without `|`, `>` and the like (for these, use [sh, -c, TEXT])"
    if isinstance(node, yaml.SequenceNode):
        arguments = tuple(_scalar_text(item, takes) for item in node.value)
    else:
        try:
            arguments = tuple(shlex.split(_scalar_text(node, takes)))
        except ValueError:
            raise InvalidYamlValue(takes) from None
        if any(_SHELL_OPERATOR.fullmatch(argument) for argument in arguments):
            raise InvalidYamlValue(takes)
    if not arguments or not arguments[0]:
        raise InvalidYamlValue(takes)
    return arguments
