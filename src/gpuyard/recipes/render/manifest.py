"""What is to be rendered, as a file says it: a JSON array of entries, or JSON Lines with an entry on each.

    {"scene": "room.ply", "actor": "walk/", "labels": ["a", 2, {"name": "c", "camera": 3}]}
    {"scene": "room.ply", "actor": null, "label": "d"}
    {"scene": "room.ply", "name": "e", "camera": 5}

The content decides which it is, not the file's name. Paths are meant from the manifest's folder. Labels that share
scene and actor become one unit. All other keys of an entry are the renderer's. What is wrong in one entry, or with one
label of it, is told with its number, and the rest stands.
"""

import contextlib
import gc
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.render.renderer_input import KINDS, OWN_KEYS, Pair
from gpuyard.residency.planning.render_units import Label, Unit

_BLANK = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_decode = msgspec.json.Decoder().decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Bad(msgspec.Struct, frozen=True, kw_only=True):
    """What cannot be rendered, and why; `place` is as people count: line 7; entry 3; line 7, label 2."""

    place: str
    reason: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    units: tuple[Unit, ...]
    bad: tuple[Bad, ...]

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
        raise EnvironmentFault(f"the manifest {path} cannot be read: {error.strerror}") from error
    units, bad = parse(data, file.parent)
    return Manifest(path=path, units=units, bad=bad)


def parse(data: bytes, folder: Path) -> tuple[tuple[Unit, ...], tuple[Bad, ...]]:
    """Never an error, whatever the bytes."""
    if data.startswith(_UTF_16):
        return (), (Bad(place="line 1", reason="the file is UTF-16; write it as UTF-8"),)
    data = data.removeprefix(_BYTE_ORDER_MARK)
    with _no_collections():
        try:
            word, entries = _entries(data)
        except (ValueError, RecursionError) as error:
            return (), (Bad(place=f"line {_line_of(error, data)}", reason=_json_reason(error)),)
        gathered = _Gathered(folder, word)
        for number, raw in entries:
            gathered.add(number, raw)
        return gathered.units(), tuple(gathered.bad)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Looking for garbage among a million new labels that all stay takes longer than reading them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# Where an entry begins and ends


def _entries(data: bytes) -> tuple[str, Iterable[tuple[int, bytes]]]:
    """What they are counted as, and each with its number."""
    text = data.strip(_BLANK)
    if text.startswith(b"["):
        return "entry", ((number, bytes(raw)) for number, raw in enumerate(_decode_array(text), 1))
    if _is_one_object(text):
        return "entry", [(1, text)]
    lines = enumerate(data.split(b"\n"), 1)
    return "line", ((number, line) for number, line in lines if line.strip(_BLANK))


def _is_one_object(text: bytes) -> bool:
    """Over several lines, as a tool that writes for people would."""
    first, end, _ = text.partition(b"\n")
    return bool(end) and not _is_json(first) and _is_json(text)


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (ValueError, RecursionError):
        return False
    return True


def _line_of(error: Exception, data: bytes) -> int:
    """Where a whole file could not be read; the decoder tells a byte, or that the end came too early."""
    at = re.search(r"\(byte (\d+)\)", str(error))
    before = len(data) - len(data.lstrip(_BLANK))
    return data.count(b"\n", 0, before + int(at[1]) if at else len(data.rstrip(_BLANK))) + 1


def _json_reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return f"it is not JSON: {str(error).removeprefix('JSON is malformed: ')}"


# What is in an entry


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        entry = _decode(raw)
        if type(entry) is not dict:
            raise UserError(f"an entry is an object, not {KINDS[type(entry)]}")
        # More colons than keys: some may stand in strings, or a key was there twice and the decoder kept one.
        if raw.count(b":") != _count_keys(entry):
            json.loads(raw, object_pairs_hook=_check_keys)
    except (ValueError, RecursionError) as error:
        raise UserError(_json_reason(error)) from None
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


def _labels_of(entry: dict[str, Any]) -> list[Any]:
    if "labels" not in entry:
        return [entry.get("label")]
    if "label" in entry:
        raise UserError("it has both 'labels' and 'label'")
    if type(entry["labels"]) is not list:
        raise UserError(f"its labels are not a list but {KINDS[type(entry['labels'])]}")
    labels: list[Any] = entry["labels"]
    return labels


class _Gathered:
    """Entries as they come, and the labels of each scene and actor together, in the order in which these first came."""

    def __init__(self, folder: Path, word: str) -> None:
        self.bad: list[Bad] = []
        self._folder, self._word = folder, word
        self._paths: dict[str, str] = {}
        self._pairs: dict[tuple[str | None, str | None], Pair] = {}
        self._named: dict[str, int] = {}

    def units(self) -> tuple[Unit, ...]:
        return tuple(
            Unit(scene=scene, actor=actor, labels=tuple(pair.labels))
            for (scene, actor), pair in self._pairs.items()
            if pair.labels
        )

    def add(self, number: int, raw: bytes) -> None:
        try:
            entry = _decoded(raw)
            pair = self._pair(entry)
            labels = _labels_of(entry)
        except UserError as error:
            self.bad.append(Bad(place=f"{self._word} {number}", reason=error.message))
            return
        extras = {key: value for key, value in entry.items() if key not in OWN_KEYS}
        is_alone = "labels" not in entry
        for at, label in enumerate(labels, 1):
            try:
                self._name(pair.label(extras, label, is_alone=is_alone), number, pair)
            except UserError as error:
                which = "" if is_alone else f", label {at}"
                self.bad.append(Bad(place=f"{self._word} {number}{which}", reason=error.message))

    def _name(self, label: Label, number: int, pair: Pair) -> None:
        if label.name in self._named:
            raise UserError(f"its name '{label.name}' is taken by {self._word} {self._named[label.name]}")
        self._named[label.name] = number
        pair.labels.append(label)

    def _pair(self, entry: dict[str, Any]) -> Pair:
        scene, actor = (self._path(key, entry.get(key)) for key in ("scene", "actor"))
        if scene is None and actor is None:
            raise UserError("it names neither a scene nor an actor")
        found = self._pairs.get((scene, actor))
        if found is None:
            found = self._pairs[scene, actor] = Pair(*(entry.get(key) for key in ("scene", "actor")))
        return found

    def _path(self, key: str, path: Any) -> str | None:
        if path is None:
            return None
        if type(path) is not str:
            raise UserError(f"its {key} is not a path but {KINDS[type(path)]}")
        if not path or "\0" in path:
            raise UserError(f"its {key} is not a path")
        found = self._paths.get(path)
        if found is None:
            found = self._paths[path] = str(self._folder / path)
        return found
