"""Read a manifest, the list of what to render: a JSON array of entries, or JSON Lines with one entry per line.

    {"scene": "room.ply", "actor": "walk/", "labels": ["a", 2, {"name": "c", "camera": 3}]}
    {"scene": "room.ply", "name": "e", "camera": 5}

The content decides the format. Labels that share scene and actor become one render unit. A mistake in one entry or
label is reported with its number, and the rest is rendered. The renderer gets an object with the entry's other keys,
overridden by the label's keys, or with the label itself as `label`.

The name is the label's `name`, else its `id`, else the label itself if it is a string. The name of a number, or of a
label without any of these, starts with its scene and actor. Different labels never get the same folder: a plain name is
unchanged; other characters, and `%`, are percent-encoded as in a URL; a name that is too long is cut and ends in `%~`
and a digest of the whole name, as no other name can."""

import difflib
import gc
import hashlib
import json
import os.path
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.render.planning.assets_and_units import Label, Unit

_BLANK = b" \t\r\n"
_OWN_KEYS = frozenset({"scene", "actor", "labels", "label"})
# For each key that may be misspelled, the keys that show that it is not missing.
_MISSED_WITHOUT = {
    "scene": {"scene"}, "actor": {"actor"}, "labels": {"labels", "label"}, "label": {"labels", "label"},
    "name": {"name", "id", "labels", "label"},
}  # fmt: skip
_KINDS = {
    dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip
RESERVED = frozenset({"skipped.jsonl", "status.json"})
_LONGEST = 200  # bytes; file systems allow 255
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_decode = msgspec.json.Decoder().decode


class ManifestMistake(msgspec.Struct, frozen=True, kw_only=True):
    """An entry or label that cannot be rendered. `place` counts from 1: line 7; entry 3; line 7, label 2."""

    place: str
    reason: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    units: tuple[Unit, ...]
    bad: tuple[ManifestMistake, ...]

    @property
    def labels(self) -> int:
        return sum(len(unit.labels) for unit in self.units)


def read(path: str) -> Manifest:
    try:
        file = Path(path).absolute()
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"there is no manifest {path}", hint="name a file of JSON or JSON Lines") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder", hint="name the manifest itself, a file of JSON or JSON Lines") from None
    except OSError as error:
        raise EnvironmentFault(f"cannot read the manifest {path}: {error.strerror}") from error
    units, bad = parse(data, file.parent)
    return Manifest(path=path, units=units, bad=bad)


def parse(data: bytes, folder: Path) -> tuple[tuple[Unit, ...], tuple[ManifestMistake, ...]]:
    """Return the render units and the mistakes. Never raises."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return (), (ManifestMistake(place="line 1", reason="the file is UTF-16; write it as UTF-8"),)
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        noun, entries = _split_entries(data)
    except (ValueError, RecursionError) as error:
        # The decoder reports a byte, or that the text ended too early.
        at = re.search(r"\(byte (\d+)\)", str(error))
        before = len(data) - len(data.lstrip(_BLANK))
        line = data.count(b"\n", 0, before + int(at[1]) if at else len(data.rstrip(_BLANK))) + 1
        return (), (ManifestMistake(place=f"line {line}", reason=_json_reason(error)),)
    builder = _UnitBuilder(folder, noun)
    # Garbage collection over a million new labels, all in use, takes longer than reading them.
    was_on = gc.isenabled()
    gc.disable()
    try:
        for number, raw in entries:
            builder.add(number, raw)
        return builder.units(), tuple(builder.mistakes)
    finally:
        if was_on:
            gc.enable()


def _split_entries(data: bytes) -> tuple[str, Iterable[tuple[int, bytes]]]:
    """Return the noun that entries are counted by ("entry" or "line"), and each entry with its number."""
    text = data.strip(_BLANK)
    if text.startswith(b"["):
        raws = msgspec.json.decode(text, type=list[msgspec.Raw])
        return "entry", ((number, bytes(raw)) for number, raw in enumerate(raws, 1))
    first, end, _ = text.partition(b"\n")
    if end and not _is_json(first) and _is_json(text):  # a single object, formatted over several lines
        return "entry", [(1, text)]
    return "line", ((number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip(_BLANK))


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (ValueError, RecursionError):
        return False
    return True


def _json_reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return f"it is not JSON: {str(error).removeprefix('JSON is malformed: ')}"


def _decode_entry(raw: bytes) -> dict[str, Any]:
    try:
        entry = _decode(raw)
        if type(entry) is not dict:
            raise UserError(f"an entry is an object, not {_KINDS[type(entry)]}")
        # More colons than keys: some are in strings, or a key occurs twice and the decoder kept one.
        if raw.count(b":") != _count_keys(entry):
            json.loads(raw, object_pairs_hook=_check_keys)
    except (ValueError, RecursionError) as error:
        raise UserError(_json_reason(error)) from None
    for key, value in entry.items():
        near = None if key in _OWN_KEYS else _own_key_like(key)
        if near is None or not entry.keys().isdisjoint(_MISSED_WITHOUT[near]):
            continue
        if near in ("label", "name") or type(value) not in (int, float, bool):  # "factor": 2 is no actor
            raise UserError(f"it has the key '{key}' and no '{near}': did you mean '{near}'?")
    return entry


def _count_keys(value: dict[str, Any] | list[Any]) -> int:
    count, parts = (len(value), value.values()) if isinstance(value, dict) else (0, value)
    for part in parts:
        if type(part) is dict or type(part) is list:
            count += _count_keys(part)
    return count


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    seen = set[str]()
    for key, _ in pairs:
        if key in seen:
            raise UserError(f"it has the key '{key}' twice")
        seen.add(key)


@lru_cache(maxsize=1000)
def _own_key_like(key: str) -> str | None:
    # actr, acotr, actors and Actor are like actor; vector, frame and scene_id are not like one of ours
    return next(iter(difflib.get_close_matches(key.lower(), _MISSED_WITHOUT, n=1, cutoff=0.8)), None)


class _LabelGroup:
    """The labels of one scene and actor, whose paths are as written in the manifest."""

    def __init__(self, scene: str | None, actor: str | None) -> None:
        self.labels: list[Label] = []
        self._name = name_of_pair(scene, actor)
        self._seen = 0

    def make_label(self, extras: dict[str, Any], label: Any, *, is_only: bool) -> Label:
        """Return the label. `is_only`: the entry has one label; its own keys name the label, and may be all of it."""
        self._seen += 1
        if type(label) is dict:
            value = {**extras, **label} if extras else label
        elif label is None and is_only:
            value = extras
        elif type(label) in (str, int, float):
            value = {**extras, "label": label}
        else:
            raise UserError(f"a label is a string, a number or an object, not {_KINDS[type(label)]}")
        named = value if is_only else label if type(label) is dict else {}
        key, given = next(((key, named[key]) for key in ("name", "id") if named.get(key) is not None), ("", None))
        if given is None:
            key, given = "name", label if type(label) is str else None
        if type(given) not in (str, int, float, type(None)):
            raise UserError(f"its {key} is {_KINDS[type(given)]}, not a string or a number")
        if given == "":
            raise UserError("its name is empty")
        if given is None:
            given = f"{self._name}-{label}" if type(label) in (int, float) else f"{self._name}-label{self._seen}"
        return Label(name=folder_name(str(given)), value=value)


class _UnitBuilder:
    """Collects the labels of each pair of scene and actor, in the order in which the pairs first occur."""

    def __init__(self, folder: Path, noun: str) -> None:
        self.mistakes: list[ManifestMistake] = []
        self._folder, self._noun = folder, noun
        self._paths: dict[str, str] = {}
        self._pairs: dict[tuple[str | None, str | None], _LabelGroup] = {}
        self._names: dict[str, int] = {}

    def units(self) -> tuple[Unit, ...]:
        used = ((pair, group) for pair, group in self._pairs.items() if group.labels)
        return tuple(Unit(scene=scene, actor=actor, labels=tuple(each.labels)) for (scene, actor), each in used)

    def add(self, number: int, raw: bytes) -> None:
        try:
            entry = _decode_entry(raw)
            group = self._group(entry)
            is_only = "labels" not in entry
            if not is_only and "label" in entry:
                raise UserError("it has both 'labels' and 'label'")
            labels = [entry.get("label")] if is_only else entry["labels"]
            if type(labels) is not list:
                raise UserError(f"its labels are not a list but {_KINDS[type(labels)]}")
        except UserError as error:
            self.mistakes.append(ManifestMistake(place=f"{self._noun} {number}", reason=error.message))
            return
        extras = {key: value for key, value in entry.items() if key not in _OWN_KEYS}
        for position, label in enumerate(labels, 1):
            try:
                made = group.make_label(extras, label, is_only=is_only)
                if made.name in self._names:
                    raise UserError(f"its name '{made.name}' is taken by {self._noun} {self._names[made.name]}")
                self._names[made.name] = number
                group.labels.append(made)
            except UserError as error:
                which = "" if is_only else f", label {position}"
                self.mistakes.append(ManifestMistake(place=f"{self._noun} {number}{which}", reason=error.message))

    def _group(self, entry: dict[str, Any]) -> _LabelGroup:
        for key in ("scene", "actor"):
            path = entry.get(key)
            if path is None:
                continue
            if type(path) is not str:
                raise UserError(f"its {key} is not a path but {_KINDS[type(path)]}")
            if not path or "\0" in path:
                raise UserError(f"its {key} is not a path")
            if path not in self._paths:
                self._paths[path] = str(self._folder / path)
        scene, actor = (self._paths.get(entry.get(key, "")) for key in ("scene", "actor"))
        if scene is None and actor is None:
            raise UserError("it names neither a scene nor an actor")
        found = self._pairs.get((scene, actor))
        if found is None:
            found = self._pairs[scene, actor] = _LabelGroup(entry.get("scene"), entry.get("actor"))
        return found


def folder_name(name: str) -> str:
    """Return the folder name for the label `name`, which is not empty."""
    if len(name) <= _LONGEST and _PLAIN.fullmatch(name) and name not in RESERVED:
        return name
    letters = [letter if letter.isprintable() and letter not in "/%" else _escaped(letter) for letter in name]
    if name[0] == "." or name in RESERVED:
        letters[0] = _escaped(name[0])
    whole = "".join(letters)
    if len(whole.encode()) <= _LONGEST:
        return whole
    end = f"%~{hashlib.sha256(whole.encode()).hexdigest()[:16]}"
    return whole.encode()[: _LONGEST - len(end)].decode(errors="ignore") + end


def _escaped(letter: str) -> str:
    return "".join(f"%{byte:02X}" for byte in letter.encode())


def name_of_pair(scene: str | None, actor: str | None) -> str:
    """Return the prefix for labels without a name. The digest distinguishes equal file names in different folders."""
    parts = []
    for path in (scene, actor):
        if path is not None:
            folder, last = os.path.split(path.rstrip("/"))
            is_glob = folder and any(letter in last for letter in "*?[")  # it is named after its folder
            parts.append(os.path.splitext(os.path.basename(folder) if is_glob else last)[0])
    return "-".join([*parts, hashlib.sha256(repr((scene, actor)).encode()).hexdigest()[:8]])
