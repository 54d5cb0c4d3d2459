"""Read hand-written YAML strictly, as settings of given types: every mistake is reported with its file, line and key. A
file is composed into nodes, never constructed into objects, so no tag is ever executed, an alias costs nothing, and a
name written `007` or `no` stays that text. An empty value counts as not given.
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

from gpuyard.errors import UserError
from gpuyard.model.job_spec import RetryCause
from gpuyard.model.machine_snapshot import Vendor
from gpuyard.model.stopping import parse_warning
from gpuyard.model.submit_options import MAX_PRIORITY
from gpuyard.model.units import parse_duration, parse_size
from gpuyard.system.private_files import PrivateFileError, read_small

# The C parser is about ten times faster, but PyYAML may be built without it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAGS = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_TAGS + kind for kind in ("null", "bool", "int", "float", "str", "timestamp", "value", "seq", "map")}
# In bytes: a file name may have 255, and the label is only a part of ours.
LONGEST_LABEL = 180
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

T = TypeVar("T")
SettingType = Callable[[yaml.Node], Any]


class _Mistake(Exception):
    """`takes` is what the value at `node` has to be; without a node, the whole value of the key is wrong."""

    def __init__(self, takes: str, node: yaml.Node | None = None) -> None:
        super().__init__(takes)
        self.node = node


# Files


def compose_file(path: Path) -> yaml.Node | None:
    try:
        with path.open("rb") as file:
            content = read_small(file, str(path))
        return compose(content.decode("utf-8-sig"))
    except OSError as error:
        raise cannot_read(path, error) from error
    except PrivateFileError as error:
        raise UserError(str(error), hint=error.hint) from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 text", hint="save it as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        said = ", ".join(filter(None, (getattr(error, name, None) for name in ("context", "problem", "reason"))))
        hint = "indent with spaces, not with tabs; quote a value that begins with a sign" if "token" in said else None
        raise UserError(f"{path}:{mark.line + 1 if mark else 1}: not YAML: {said}", hint=hint) from error


def cannot_read(path: Path, error: OSError) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"there is no file {path}")
    return UserError(f"cannot read {path}: {error.strerror}")


def compose(text: str, *, is_first: bool = False) -> yaml.Node | None:
    """Return the only document, or the first, or None if the text is empty. Raises YAMLError if it is not YAML."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > 100:  # PyYAML composes recursively and crashes on ten thousand nested brackets
            mark: Any = event.start_mark  # the type stubs know two classes of marks, and accept only one here
            raise yaml.MarkedYAMLError(problem="it is nested too deeply", problem_mark=mark)
    first: yaml.Node | None = next(yaml.compose_all(text, Loader=_Loader), None) if is_first else None
    return first if is_first else yaml.compose(text, Loader=_Loader)


# Keys and values


def read_mapping(node: yaml.Node | None, types: Mapping[str, SettingType], path: Path) -> dict[str, tuple[Any, int]]:
    """Return the value and the line of each key of a mapping. Raises one UserError that lists all mistakes by line."""
    if node is None or is_empty(node):
        return {}
    if not isinstance(node, yaml.MappingNode):
        what = f"expected keys with values, not {describe(node)}"
        raise UserError(f"{path}:{line_of(node)}: {what}", hint="write each as `key: value`")
    values: dict[str, tuple[Any, int]] = {}
    mistakes: list[tuple[int, str, str | None]] = []
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = key_node.value, line_of(key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            mistakes.append((line, f"{describe(key_node)} cannot be a key", None))
        elif key not in types:
            near = closest_key(key, types)
            hint = f"did you mean `{near}`?" if near else f"the keys are {', '.join(types)}"
            mistakes.append((line, f"there is no key `{key}`", hint))
        elif seen.setdefault(key, line) != line:
            mistakes.append((line, f"`{key}` is given twice, first on line {seen[key]}", "keep one of them"))
        elif not is_empty(value_node):
            try:
                values[key] = types[key](value_node), line
            except _Mistake as wrong:
                place = wrong.node or value_node
                mistakes.append((line_of(place), f"`{key}` takes {wrong}, not {describe(place)}", None))
    if mistakes:
        own_hint = mistakes[0][2] if len(mistakes) == 1 else None
        mistakes.sort(key=lambda each: each[:2])
        lines = (f"{path}:{line}: {text}{f' ({hint})' if hint != own_hint else ''}" for line, text, hint in mistakes)
        raise UserError("\n".join(lines), hint=own_hint)
    return values


def closest_key(key: str, known: Mapping[str, Any], min_similarity: float = 0.6) -> str | None:
    found = difflib.get_close_matches(key.lower().replace("-", "_"), list(known), n=1, cutoff=min_similarity)
    return found[0] if found else None


def line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and (node.tag == f"{_TAGS}null" or not node.value.strip())


def describe(node: yaml.Node) -> str:
    if node.tag not in _PLAIN_TAGS:
        return f"a value with the tag {node.tag}"
    if isinstance(node, yaml.ScalarNode):
        text = node.value.encode(errors="backslashreplace").decode()
        return f"'{text if len(text) <= 60 else f'{text[:59]}…'}'"
    return "a list" if isinstance(node, yaml.SequenceNode) else "keys with values"


def has_control_characters(value: str) -> bool:
    """Whether the text has characters that break a line, a table or a terminal."""
    return any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in value)


# Types


def _scalar_text(node: yaml.Node, takes: str) -> str:
    """Return a scalar's text as written. Raises _Mistake for other nodes, and for NUL and lone surrogates: file names
    and environment variables cannot hold them."""
    is_plain = isinstance(node, yaml.ScalarNode) and node.tag in _PLAIN_TAGS
    if not is_plain or any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in node.value):
        raise _Mistake(takes, node)
    return str(node.value)


def _scalar(
    takes: str, parse: Callable[[str], T], accepts: Callable[[T], object] = lambda _: True
) -> Callable[[yaml.Node], T]:
    """Return the type of a scalar. `parse` raises LookupError, ValueError or UserError for text that is not valid."""

    def convert(node: yaml.Node) -> T:
        written = _scalar_text(node, takes)
        try:
            value = parse(written)
            if accepts(value):
                return value
        except (LookupError, ValueError, UserError):
            pass
        raise _Mistake(takes)

    return convert


def _parse_whole(written: str) -> int:
    if not re.fullmatch(r"\s*[+-]?\d{1,12}\s*", written, re.ASCII):
        raise ValueError(written)
    return int(written)


def _word(written: str) -> str:
    return written.strip().lower()


def _name(written: str) -> str | None:
    return None if _word(written) == "default" else _word(written)


def whole(least: int) -> Callable[[yaml.Node], int]:
    return _scalar(f"a whole number of {least} or more", _parse_whole, lambda number: number >= least)


text = _scalar("text", str)
flag = _scalar("true or false", lambda written: _FLAGS[written.lower()])
priority = _scalar(
    f"a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}", _parse_whole, lambda number: abs(number) <= MAX_PRIORITY
)
# None for all GPUs.
gpu_count = _scalar(
    "`all` or a whole number of 0 or more",
    lambda written: None if _word(written) == "all" else _parse_whole(written),
    lambda number: number is None or number >= 0,
)
no_gpu = _scalar("0, for work without a GPU (`gpus` is the number of a task's GPUs)", _parse_whole, (0).__eq__)
# None for the queue's default. Whether the engine exists is checked on use.
engine = _scalar(
    "default, or the name of an engine: local, slurm, ray", _name, lambda name: name is None or name.isidentifier()
)
vendor = _scalar(f"default, or a vendor of GPUs: {', '.join(Vendor)}", _name, (None, *Vendor).__contains__)
sessions = _scalar("tmux or none", _word, ("tmux", "none").__contains__)
retry_causes = _scalar(
    f"some of {', '.join(RetryCause)}",
    str,
    lambda causes: {each.strip() for each in causes.split(",")} <= {*RetryCause},
)
stop_signal = _scalar("a signal and a time, such as USR1@5m", str, parse_warning)
seconds = _scalar("a time such as 30, 30s or 4h", parse_duration)
positive_seconds = _scalar("a time of more than 0, such as 30, 30s or 4h", parse_duration, bool)
size_mb = _scalar("a size such as 8G, or a number of MB", parse_size, lambda size: 0 < size < math.inf)
function = _scalar(
    "MODULE:FUNCTION, such as my_args:parse_config", str, re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*").fullmatch
)
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


def environment(node: yaml.Node) -> dict[str, str]:
    """Return names and values. Values keep their text as written: `yes` stays `yes`, `1e-3` stays `1e-3`."""
    takes = "names of environment variables with their values, each name once"
    if not isinstance(node, yaml.MappingNode):
        raise _Mistake(takes)
    values: dict[str, str] = {}
    for name_node, value_node in node.value:
        name = _scalar_text(name_node, takes)
        value = "" if is_empty(value_node) else _scalar_text(value_node, takes)
        if not _VARIABLE.fullmatch(name) or name in values:
            raise _Mistake(takes, name_node)
        values[name] = value
    return values


def mounts(node: yaml.Node) -> tuple[str, ...]:
    takes = "folders as for --mount, such as [/data/sets:/data:ro]"
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    found = tuple(_scalar_text(item, takes) for item in nodes)
    if not all(found):
        raise _Mistake(takes)
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
            raise _Mistake(takes) from None
        if any(re.fullmatch(r"[|&;<>]+", argument) for argument in arguments):
            raise _Mistake(takes)
    if not arguments or not arguments[0]:
        raise _Mistake(takes)
    return arguments
