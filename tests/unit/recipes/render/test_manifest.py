"""A manifest: entries become render units, and mistakes are reported with their place."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.errors import UserError
from gpuyard.recipes.render.manifest import folder_name, name_of_pair, parse, read
from gpuyard.recipes.render.planning.assets_and_units import Unit

FOLDER = Path("/data/shots")
Json = dict[str, Any]


def lines(*entries: Any) -> bytes:
    return "".join(f"{json.dumps(entry)}\n" for entry in entries).encode()


def units_of(*entries: Any) -> list[Unit]:
    units, bad = parse(lines(*entries), FOLDER)
    assert bad == ()
    return list(units)


def bad_of(*entries: Any) -> list[tuple[str, str]]:
    return [(bad.place, bad.reason) for bad in parse(lines(*entries), FOLDER)[1]]


def names_of(*entries: Any) -> list[str]:
    return [label.name for unit in units_of(*entries) for label in unit.labels]


def values_of(*entries: Any) -> list[Any]:
    return [label.value for unit in units_of(*entries) for label in unit.labels]


# Formats

TWO: list[Json] = [
    {"scene": "a.ply", "actor": "walk", "labels": ["x", "y"]},
    {"scene": "b.ply", "actor": None, "label": "z"},
]


@pytest.mark.parametrize(
    "data",
    [
        lines(*TWO),
        json.dumps(TWO).encode(),
        json.dumps(TWO, indent=2).encode(),
        b"\xef\xbb\xbf" + lines(*TWO),
        b"\xef\xbb\xbf\n  " + json.dumps(TWO).encode(),
        lines(*TWO).replace(b"\n", b"\r\n"),
        b"\n\n" + lines(*TWO).replace(b"\n", b"\n  \t\n\n"),
        lines(*TWO).rstrip(),
    ],
    ids=["lines", "array", "array over lines", "BOM", "BOM, array", "CRLF", "blank lines", "no last newline"],
)
def test_json_and_json_lines_are_detected_by_content(data: bytes) -> None:
    units, bad = parse(data, FOLDER)
    assert bad == ()
    assert [(unit.scene, unit.actor, [label.name for label in unit.labels]) for unit in units] == [
        ("/data/shots/a.ply", "/data/shots/walk", ["x", "y"]),
        ("/data/shots/b.ply", None, ["z"]),
    ]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_single_object_is_a_manifest(indent: int | None) -> None:
    units, bad = parse(json.dumps(TWO[0], indent=indent).encode(), FOLDER)
    assert ([label.name for label in units[0].labels], bad) == (["x", "y"], ())


def test_labels_with_the_same_scene_and_actor_are_one_unit_in_order_of_appearance() -> None:
    units = units_of(
        {"scene": "b.ply", "label": "1"},
        {"scene": "a.ply", "label": "2"},
        {"scene": "./b.ply", "actor": None, "labels": ["3", "4"]},
        {"scene": "/data/shots/a.ply", "label": "5"},
        {"scene": "a.ply", "actor": "walk", "label": "6"},
    )
    assert [[label.name for label in unit.labels] for unit in units] == [["1", "3", "4"], ["2", "5"], ["6"]]


def test_an_entry_has_labels_or_is_one_and_its_other_keys_go_to_the_renderer() -> None:
    assert units_of({"actor": "/walks/*.ply", "label": "1"})[0].actor == "/walks/*.ply"
    assert values_of({"scene": "a.ply", "name": "shot", "camera": 3}) == [{"name": "shot", "camera": 3}]
    assert units_of({"scene": "a.ply", "labels": []}) == []
    entry = {"scene": "a.ply", "fov": 60, "size": [4, 3], "labels": [{"id": "n", "fov": 90}, "s", 7]}
    assert values_of(entry) == [
        {"fov": 90, "size": [4, 3], "id": "n"},
        {"fov": 60, "size": [4, 3], "label": "s"},
        {"fov": 60, "size": [4, 3], "label": 7},
    ]


# Values for the renderer


# Names of labels


def test_a_label_is_named_by_its_name_its_id_or_its_value() -> None:
    labels = [{"name": "a", "id": "b"}, {"id": "c"}, {"id": 17}, "d", {"name": None, "id": "e"}]
    assert names_of({"scene": "a.ply", "labels": labels}) == ["a", "c", "17", "d", "e"]
    assert names_of({"scene": "a.ply", "name": "f", "label": {"camera": 3}}) == ["f"]
    assert names_of({"scene": "a.ply", "id": 9, "label": "g"}) == ["9"]
    assert names_of({"scene": "a.ply", "name": "shot", "labels": ["x", "y"]}) == ["x", "y"]


def test_nameless_labels_are_named_after_their_scene_and_actor_and_nothing_else() -> None:
    entries = [
        {"scene": f"{folder}/room.ply", "actor": "walk/*.ply", "labels": [0, 1.5, {"camera": 3}]} for folder in "ab"
    ]
    names = names_of(*entries)
    assert len(set(names)) == 6
    assert all(name.startswith("room-walk-") for name in names)
    assert [name.rpartition("-")[2] for name in names[:3]] == ["0", "1.5", "label3"]
    entry = {"scene": "a.ply", "actor": "walk", "labels": [{"camera": 1}, {"camera": 2}]}
    before = names_of(entry)
    assert names_of({"scene": "b.ply", "label": 1}, entry)[1:] == before
    assert [label.name for label in parse(lines(entry), Path("/elsewhere"))[0][0].labels] == before


def test_a_name_that_is_not_a_valid_folder_name_is_escaped() -> None:
    labels = ["a/b", "../..", "skipped.jsonl", "a%2Fb", "é x", "line\nbreak"]
    assert names_of({"scene": "a.ply", "labels": labels}) == [
        "a%2Fb", "%2E.%2F..", "%73kipped.jsonl", "a%252Fb", "é x", "line%0Abreak",
    ]  # fmt: skip


# Mistakes


def test_a_bad_line_is_reported_with_its_number_and_the_rest_is_used() -> None:
    data = b'{"scene": "a.ply", "label": "x"}\n\n{"scene": \n' + lines([1], {"scene": "b.ply", "label": "y"})
    units, bad = parse(data, FOLDER)
    assert [label.name for unit in units for label in unit.labels] == ["x", "y"]
    assert [each.place for each in bad] == ["line 3", "line 4"]
    assert bad[0].reason.startswith("it is not JSON")
    assert bad[1].reason == "an entry is an object, not a list"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"scene": 3, "label": "x"}, "its scene is not a path but a number"),
        ({"scene": "a.ply", "actor": ["b"], "label": "x"}, "its actor is not a path but a list"),
        ({"scene": "", "label": "x"}, "its scene is not a path"),
        ({"scene": "a\0b", "label": "x"}, "its scene is not a path"),
        ({"label": "x"}, "it names neither a scene nor an actor"),
        ({"scene": None, "actor": None, "label": "x"}, "it names neither a scene nor an actor"),
        ({"scene": "a.ply", "labels": "x"}, "its labels are not a list but a string"),
        ({"scene": "a.ply", "labels": None}, "its labels are not a list but null"),
        ({"scene": "a.ply", "labels": ["x"], "label": "y"}, "it has both 'labels' and 'label'"),
        ({"scene": "a.ply", "label": [1]}, "a label is a string, a number or an object, not a list"),
        ({"scene": "a.ply", "label": ""}, "its name is empty"),
        ({"scene": "a.ply", "name": True}, "its name is true or false, not a string or a number"),
    ],
)
def test_a_bad_entry_is_reported_with_the_reason(entry: Json, reason: str) -> None:
    assert bad_of({"scene": "z.ply", "label": "z"}, entry) == [("line 2", reason)]


@pytest.mark.parametrize(
    ("typed", "value", "meant"),
    [
        ("actr", "walk", "actor"), ("Actor", "walk", "actor"), ("actors", ["walk"], "actor"), ("acotr", None, "actor"),
        ("lables", ["x", "y"], "labels"), ("lable", 3, "label"), ("nam", "x", "name"),
    ],
)  # fmt: skip
def test_a_misspelled_key_is_reported_with_the_key_that_was_meant(typed: str, value: Any, meant: str) -> None:
    reason = f"it has the key '{typed}' and no '{meant}': did you mean '{meant}'?"
    assert bad_of({"scene": "z.ply"}, {"scene": "a.ply", typed: value}) == [("line 2", reason)]
    assert bad_of({"scen": "a.ply", "actor": "walk"})[0][1].endswith("did you mean 'scene'?")


def test_keys_unlike_ours_or_beside_ours_or_that_are_no_paths_are_passed_to_the_renderer() -> None:
    extras = {"frame": 3, "scene_id": "k", "vector": "up", "camera": 2, "fname": "c"}
    assert values_of({"scene": "a.ply", "label": "x", **extras}) == [{**extras, "label": "x"}]
    assert values_of({"scene": "a.ply", "name": "x", "factor": 2.5}) == [{"name": "x", "factor": 2.5}]
    assert values_of({"scene": "a.ply", "actor": None, "id": "x", "factor": "high", "names": "c"}) == [
        {"id": "x", "factor": "high", "names": "c"}
    ]


def test_a_bad_or_duplicate_label_is_left_out_and_the_others_are_kept() -> None:
    units, bad = parse(lines({"scene": "a.ply", "labels": ["x", None, True, "y"]}), FOLDER)
    assert [label.name for label in units[0].labels] == ["x", "y"]
    assert [each.place for each in bad] == ["line 1, label 2", "line 1, label 3"]
    entries = ({"scene": "a.ply", "labels": ["x", "x"]}, {"scene": "b.ply", "name": "x"})
    assert bad_of(*entries) == [
        ("line 1, label 2", "its name 'x' is taken by line 1"),
        ("line 2", "its name 'x' is taken by line 1"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"scene": "a.ply", "fov": NaN}', "it is not JSON"),
        (b'{"scene": "a.ply", "fov": 1e999}', "it is not JSON"),
        (b'{"scene": "a.ply", "scene": "b.ply"}', "it has the key 'scene' twice"),
        (b'{"scene": "a.ply", "label": {"at": "1:2", "x": 1, "x": 2}}', "it has the key 'x' twice"),
        (b'{"scene": "\xff"}', "it is not UTF-8"),
        (b'{"scene": "\\ud800"}', "it is not JSON"),
        (b'{"scene": ' + b"[" * 100_000, "it is nested too deeply"),
        (b"{'scene': 'a.ply'}", "it is not JSON"),
        (b'{"scene": "a.ply"} {"scene": "b.ply"}', "it is not JSON: trailing characters"),
    ],
)
def test_invalid_json_is_a_bad_line(line: bytes, reason: str) -> None:
    units, bad = parse(b'{"scene": "a.ply", "label": "x"}\n' + line + b"\n", FOLDER)
    assert len(units) == 1
    assert [(each.place, each.reason.startswith(reason)) for each in bad] == [("line 2", True)]


def test_a_colon_in_a_string_is_not_a_key_and_huge_numbers_are_kept() -> None:
    value = {"time": "12:30:00", "seed": 10**30, "tiny": 5e-324, "of": {"a:b": [{"c": ":"}]}}
    assert values_of({"scene": "a:b.ply", "label": value}) == [value]


@pytest.mark.parametrize(
    ("data", "place"),
    [(b'[\n{"scene": "a.ply"},\n{"scene" "b.ply"}\n]', "line 3"), (b'\n[{"scene": "a.ply"},\n\n', "line 2")],
)
def test_a_broken_array_is_reported_with_the_line_of_the_error(data: bytes, place: str) -> None:
    units, bad = parse(data, FOLDER)
    assert (units, [each.place for each in bad]) == ((), [place])


def test_a_file_in_utf_16_is_reported_as_utf_16() -> None:
    assert "UTF-16" in parse('{"scene": "a.ply"}'.encode("utf-16"), FOLDER)[1][0].reason


# The file


def test_paths_are_relative_to_the_folder_of_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/m.json").write_bytes(lines({"scene": "a.ply", "label": "x"}))
    monkeypatch.chdir(tmp_path)
    manifest = read("sub/m.json")
    assert (manifest.units[0].scene, manifest.labels) == (str(tmp_path / "sub/a.ply"), 1)


@pytest.mark.parametrize(
    ("path", "message"), [("none.json", "there is no"), (".", "is a folder"), ("m/x", "there is no")]
)
def test_a_missing_manifest_or_a_folder_is_a_user_error(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").touch()
    with pytest.raises(UserError, match=message):
        read(path)


# Any bytes

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ENTRIES = st.dictionaries(
    st.sampled_from(["scene", "actor", "labels", "label", "name", "id", "fov"]), VALUES | st.just("a.ply"), max_size=5
)
SOUND = st.fixed_dictionaries({"scene": st.sampled_from(["a.ply", "b.ply"]), "labels": st.lists(VALUES, max_size=4)})
SOME_BYTES = st.binary(max_size=40) | st.builds(lambda value: json.dumps(value).encode(), VALUES | ENTRIES | SOUND)


@given(st.lists(SOME_BYTES, max_size=6), st.sampled_from([b"\n", b",", b"\r\n"]), st.booleans())
def test_any_bytes_give_units_or_bad_places_and_never_an_error(
    parts: list[bytes], between: bytes, is_array: bool
) -> None:
    data = between.join(parts)
    units, bad = parse(b"[" + data + b"]" if is_array else data, FOLDER)
    names = [label.name for unit in units for label in unit.labels]
    assert len(names) == len(set(names))
    assert all(each.place and each.reason for each in bad)
    assert all(isinstance(label.value, dict) for unit in units for label in unit.labels)
    assert len({(unit.scene, unit.actor) for unit in units}) == len(units)


@given(st.lists(SOUND | ENTRIES, max_size=6), st.booleans())
def test_every_label_is_in_a_unit_or_reported_as_bad(entries: list[Json], is_array: bool) -> None:
    units, bad = parse(json.dumps(entries).encode() if is_array else lines(*entries), FOLDER)
    refused = {each.place for each in bad}
    kind = "entry" if is_array else "line"
    asked = sum(
        len(entry["labels"]) if "labels" in entry and f"{kind} {number}" not in refused else 1
        for number, entry in enumerate(entries, 1)
    )
    assert sum(len(unit.labels) for unit in units) + len(bad) == asked


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)
CLOSE = st.text(st.sampled_from("a%2F/~.\n"), min_size=1, max_size=12)


@given(NAMES | CLOSE)
def test_any_name_becomes_a_valid_folder_name(name: str) -> None:
    folder = folder_name(name)
    assert 0 < len(folder.encode()) <= 200
    assert "/" not in folder
    assert not folder.startswith(".")
    assert folder.isprintable()


@given(NAMES | CLOSE, NAMES | CLOSE)
def test_different_names_give_different_folders(one: str, other: str) -> None:
    assert (folder_name(one) == folder_name(other)) == (one == other)


def test_plain_names_are_not_changed_and_pairs_are_named_after_their_files() -> None:
    assert [folder_name(name) for name in ("a", "0017", "shot-3_b.v2", "-x")] == ["a", "0017", "shot-3_b.v2", "-x"]
    assert name_of_pair("rooms/a.ply", "walks/run/*.ply").startswith("a-run-")
    assert name_of_pair("rooms/a.ply", "walks/run/").startswith("a-run-")
    assert name_of_pair(None, "*.ply").startswith("*-")
    assert name_of_pair("x/a.ply", None) != name_of_pair("y/a.ply", None) != name_of_pair(None, "y/a.ply")
