"""Scenes and actors on disk: found, measured, and read into the caller's memory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuyard.errors import AssetError
from gpuyard.recipes.render.memory import read_asset_files as asset_loader
from gpuyard.recipes.render.memory.host_memory import HostMemory
from gpuyard.recipes.render.memory.named_arrays import Arrays, Field, Layout, packed
from gpuyard.recipes.render.memory.read_asset_files import Load, Loader, Source
from tests.residency_files import FORMS, PagedSink, points, splats, write_ply


class Allocations:
    """Records each allocation as a sink."""

    def __init__(self) -> None:
        self.sinks: list[PagedSink] = []

    def __call__(self, nbytes: int) -> PagedSink:
        self.sinks.append(PagedSink(nbytes, 37))
        return self.sinks[-1]

    def arrays(self, layout: Layout) -> dict[str, Any]:
        (sink,) = self.sinks
        return sink.arrays(layout)


def read(source: Source) -> list[dict[str, Any]]:
    allocate = Allocations()
    return [allocate.arrays(layout) for layout in source.read(allocate)]


def read_frame(source: Source, index: int) -> dict[str, Any]:
    allocate = Allocations()
    return allocate.arrays(source.read_frame(index, allocate))


def problem_with(path: Path | str, act: Callable[[], object]) -> str:
    with pytest.raises(AssetError) as caught:
        act()
    assert caught.value.path == str(path)
    return caught.value.message.removeprefix(f"{path}: ")


def write_frames(folder: Path, names: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        write_ply(folder / name, {"number": np.array([number] * (number + 1), "f4")})


def numbers(source: Source) -> list[float]:
    return [frame["number"][0] for frame in read(source)]


@pytest.mark.parametrize("form", FORMS)
def test_a_scene_is_measured_before_it_is_read(tmp_path: Path, form: str) -> None:
    table = splats(11)
    path = write_ply(tmp_path / "scene.ply", table, form)

    source = Loader().scene(str(path))

    assert (source.nbytes, source.frame_nbytes, source.frames, source.is_exact) == (11 * 248 + 8, 11 * 248 + 8, 1, True)
    assert source.disk_nbytes == path.stat().st_size
    (arrays,) = read(source)
    assert all((arrays[name] == table[name]).all() for name in table.dtype.names or ())


def test_frames_of_a_folder_are_in_natural_order(tmp_path: Path) -> None:
    names = ["f1.ply", "f2.PLY", "f10.ply", "f010b.ply", "g1.ply"]
    write_frames(tmp_path / "actor", names)
    (tmp_path / "actor" / ".f0.ply").write_bytes(b"hidden")
    (tmp_path / "actor" / "notes.txt").write_bytes(b"no frame")
    (tmp_path / "actor" / "f3.ply").mkdir()

    source = Loader().actor(str(tmp_path / "actor"))

    assert source.frames == len(names)
    assert numbers(source) == list(range(len(names)))


def test_a_pattern_finds_frames_in_natural_order_folder_by_folder(tmp_path: Path) -> None:
    for take in ("take", "take2", "take10"):
        write_frames(tmp_path / take, ["f2.ply", "f10.ply", "other.ply"])

    assert numbers(Loader().actor(f"{tmp_path}/take*/f*.ply")) == [0, 1] * 3
    assert [path.removeprefix(str(tmp_path)) for path in _paths_of(f"{tmp_path}/**/f1*.ply")] == [
        "/take/f10.ply",
        "/take2/f10.ply",
        "/take10/f10.ply",
    ]


def test_a_pattern_enters_no_links_to_folders_and_nothing_hidden(tmp_path: Path) -> None:
    write_frames(tmp_path / "take", ["f1.ply", ".f2.ply"])
    write_frames(tmp_path / "take" / ".hidden", ["f3.ply"])
    for number in range(3):  # by links, each file has 3^40 paths
        (tmp_path / "take" / f"link{number}").symlink_to(".")
    (tmp_path / "take" / "f4.ply").symlink_to("f1.ply")

    for pattern in ("**/f*.ply", "take/**"):
        assert _paths_of(f"{tmp_path}/{pattern}") == [f"{tmp_path}/take/{name}.ply" for name in ("f1", "f4")]
    assert _paths_of(f"{tmp_path}/take/.hidden/*") == [f"{tmp_path}/take/.hidden/f3.ply"]


def _paths_of(pattern: str) -> list[str]:
    loaded: list[str] = []

    def load(path: str) -> dict[str, Any]:
        loaded.append(path)
        return {"a": [1]}

    read(Loader(load).actor(pattern))
    return loaded


def test_one_file_is_an_actor_of_one_frame(tmp_path: Path) -> None:
    path = write_ply(tmp_path / "still[1]*.ply", points(5))

    source = Loader().actor(str(path))

    assert (source.frames, source.nbytes) == (1, source.frame_nbytes)


def test_all_frames_are_stored_consecutively(tmp_path: Path) -> None:
    for number in range(4):
        write_ply(tmp_path / f"{number}.ply", points(number * 3 + 1, seed=number), FORMS[number % 3])
    source = Loader().actor(str(tmp_path))
    allocate = Allocations()

    layouts = source.read(allocate)

    assert [sink.nbytes for sink in allocate.sinks] == [source.nbytes] == [sum(layout.nbytes for layout in layouts)]
    assert source.frame_nbytes == max(layout.nbytes for layout in layouts)
    starts = [min(field.offset for field in layout.fields) for layout in layouts]
    assert starts == [sum(layout.nbytes for layout in layouts[:number]) for number in range(4)]
    for number, layout in enumerate(layouts):
        table = points(number * 3 + 1, seed=number)
        arrays = allocate.arrays(layout)
        assert all((arrays[name] == table[name]).all() for name in table.dtype.names or ())


def test_a_frame_read_alone_equals_the_frame_read_with_all_others(tmp_path: Path) -> None:
    write_frames(tmp_path, ["1.ply", "2.ply", "3.ply"])
    source = Loader().actor(str(tmp_path))

    assert read_frame(source, 2)["number"].tolist() == [2, 2, 2]


def test_a_file_of_an_unknown_format_gives_a_hint(tmp_path: Path) -> None:
    (tmp_path / "scene.obj").write_bytes(b"v 1 2 3\n")

    with pytest.raises(AssetError) as caught:
        Loader().scene(str(tmp_path / "scene.obj"))

    assert (caught.value.path, caught.value.hint) == (
        str(tmp_path / "scene.obj"),
        "other formats need your own loader (--loader)",
    )


def test_an_actor_without_frames_is_reported(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"no frame")

    for path in (tmp_path, tmp_path / "*.ply"):
        assert problem_with(path, lambda: Loader().actor(str(path))) == "it has no frames"  # noqa: B023
    assert problem_with(tmp_path / "gone", lambda: Loader().actor(f"{tmp_path}/gone")) == "there is no such file"
    assert problem_with("a\0/*", lambda: Loader().actor("a\0/*")) == "it has no frames"
    assert "null" in problem_with("a\0", lambda: Loader(np.load).scene("a\0"))


def test_a_bad_frame_is_reported_by_its_file_before_anything_is_read(tmp_path: Path) -> None:
    write_frames(tmp_path, ["1.ply", "2.ply", "3.ply"])
    os.truncate(tmp_path / "2.ply", 90)

    assert "it has" in problem_with(tmp_path / "2.ply", lambda: Loader().actor(str(tmp_path)))


def test_a_frame_that_vanishes_is_reported(tmp_path: Path) -> None:
    write_frames(tmp_path, ["1.ply", "2.ply"])
    source = Loader().actor(str(tmp_path))
    own = Loader(lambda path: {"a": [1]}).actor(str(tmp_path))

    (tmp_path / "2.ply").unlink()

    for gone in (source, own):
        assert problem_with(tmp_path / "2.ply", lambda: read(gone)) == "there is no such file"  # noqa: B023


def load_npz(path: str) -> dict[str, Any]:
    with np.load(path) as arrays:
        return dict(arrays)


def test_a_custom_loader_may_return_arrays_of_any_shape(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "points": np.arange(12, dtype=">f8").reshape(4, 3),
        "mask": np.array([True, False, True]),
        "turned": np.arange(6, dtype="i2").reshape(2, 3).T,
        "half": np.float16(0.5),
        "none": np.empty((0, 3), "f4"),
    }
    np.savez(tmp_path / "scene.npz", **given)

    source = Loader(load_npz).scene(str(tmp_path / "scene.npz"))
    (arrays,) = read(source)

    assert (source.is_exact, source.frames) == (False, 1)
    assert source.nbytes >= source.disk_nbytes == (tmp_path / "scene.npz").stat().st_size
    assert list(arrays) == list(given)
    for name, array in given.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype.newbyteorder("=")


@pytest.mark.parametrize("held", [0, 100, 1 << 28], ids=["none", "some", "all"])
def test_a_sequence_of_a_custom_format_is_read_with_any_buffer_size(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asset_loader, "HELD_NBYTES", held)
    for number in range(12):
        np.save(tmp_path / f"frame_{number}.npy", np.full(number + 1, number))
    (tmp_path / ".hidden").write_bytes(b"no frame")
    source = Loader(lambda path: {"number": np.load(path)}).actor(str(tmp_path))

    frames = read(source)

    assert [frame["number"].tolist() for frame in frames] == [[number] * (number + 1) for number in range(12)]
    assert read_frame(source, 11)["number"].tolist() == [11] * 12


def test_a_loader_that_returns_other_arrays_again_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asset_loader, "HELD_NBYTES", 0)
    lengths = iter(range(1, 9))
    for number in range(2):
        (tmp_path / f"{number}.bin").write_bytes(b"x")
    source = Loader(lambda path: {"a": [1] * next(lengths)}).actor(str(tmp_path))

    assert "different arrays on the second call" in problem_with(tmp_path / "0.bin", lambda: read(source))


def _fail(path: str) -> dict[str, Any]:
    raise RuntimeError("unknown codec")


BAD_LOADERS: list[tuple[Callable[[str], Any], str]] = [
    (_fail, "its loader failed: RuntimeError: unknown codec"),
    (lambda path: {"a": [[1], [2, 3]]}, "its loader failed: ValueError: setting an array element"),
    (lambda path: [1, 2], "its loader returned a list, not a mapping of names to arrays"),
    (lambda path: None, "its loader returned a NoneType, not a mapping of names to arrays"),
    (lambda path: {3: [1]}, "its loader returned an array named 3"),
    (lambda path: {"a": [object()]}, "its loader returned 'a' as an array of object"),
    (lambda path: {"a": ["one"]}, "its loader returned 'a' as an array of <U3"),
    (lambda path: {"a": np.zeros(2, "f4,i4")}, "its loader returned 'a' as an array of [('f0', '<f4'), ('f1', '<i4')]"),
    (lambda path: {}, "its loader returned no values"),
    (lambda path: {"a": np.empty((0, 3))}, "its loader returned no values"),
]


@pytest.mark.parametrize(("load", "problem"), BAD_LOADERS)
def test_an_invalid_result_of_a_loader_is_reported_with_the_file(tmp_path: Path, load: Load, problem: str) -> None:
    path = tmp_path / "scene.abc"
    path.write_bytes(b"abc")
    source = Loader(load).scene(str(path))

    assert problem_with(path, lambda: read(source)).startswith(problem)
    assert problem_with(path, lambda: read_frame(source, 0)).startswith(problem)


@pytest.mark.parametrize("raised", [SystemExit(3), MemoryError("no more"), OSError("gone")])
def test_any_exception_of_a_loader_affects_its_file_only(tmp_path: Path, raised: BaseException) -> None:
    def load(path: str) -> dict[str, Any]:
        raise raised

    (tmp_path / "scene.abc").write_bytes(b"abc")
    with pytest.raises(AssetError, match=f"its loader failed: {type(raised).__name__}"):
        read(Loader(load).scene(str(tmp_path / "scene.abc")))


def test_ctrl_c_in_a_loader_is_passed_on(tmp_path: Path) -> None:
    def load(path: str) -> dict[str, Any]:
        raise KeyboardInterrupt

    (tmp_path / "scene.abc").write_bytes(b"abc")
    with pytest.raises(KeyboardInterrupt):
        read(Loader(load).scene(str(tmp_path / "scene.abc")))


def test_a_folder_is_not_a_scene(tmp_path: Path) -> None:
    for loader in (Loader(), Loader(load_npz)):
        assert problem_with(tmp_path, lambda: loader.scene(str(tmp_path))) == "it is a folder"  # noqa: B023


ROWS = 5


def in_rows() -> Arrays:
    """x, y and z of five points, interleaved as in PLY files."""
    memory = HostMemory(1 << 20)
    content = np.arange(3 * ROWS, dtype="f4")
    buffer = memory.allocate(content.nbytes)
    memory.upload([content.data.cast("B")], buffer)
    fields = (
        Field(name=name, dtype="f4", shape=(ROWS,), offset=4 * place, strides=(3,)) for place, name in enumerate("xyz")
    )
    return Arrays(memory, buffer, Layout(fields=tuple(fields), nbytes=content.nbytes), "points.ply")


def apart() -> Arrays:
    memory = HostMemory(1 << 20)
    layout = packed([("x", "f4", (ROWS,), 4), ("y", "f4", (ROWS,), 4), ("uv", "f4", (ROWS, 2), 4)])
    return Arrays(memory, memory.allocate(layout.nbytes), layout, "apart.npz")


def test_arrays_are_a_mapping_and_adjacent_columns_are_one_view() -> None:
    arrays = in_rows()
    assert (list(arrays), len(arrays), "x" in arrays, "w" in arrays) == (["x", "y", "z"], 3, True, False)
    assert arrays["y"].tolist() == [1, 4, 7, 10, 13]
    with pytest.raises(KeyError, match="w"):
        arrays["w"]
    assert repr(arrays) == "<Arrays of points.ply: x, y, z>"
    arrays = in_rows()
    columns = arrays.columns("x", "y", "z")
    assert columns.shape == (ROWS, 3)
    assert columns.tolist() == np.arange(15).reshape(5, 3).tolist()
    assert np.shares_memory(columns, arrays["y"])
    assert arrays.columns("y", "z").tolist() == [[1, 2], [4, 5], [7, 8], [10, 11], [13, 14]]
    assert arrays.columns("z").tolist() == [[2], [5], [8], [11], [14]]
    """A renderer may change the shape or the flags of an array that it was given."""
    arrays = in_rows()
    first = arrays.columns("x", "y", "z")
    first.shape = (1, ROWS, 3)
    second = arrays.columns("x", "y", "z")
    assert second.shape == (ROWS, 3)
    assert np.shares_memory(first, second)
    with pytest.raises(KeyError, match="nx"):
        in_rows().columns("x", "nx")


@pytest.mark.parametrize("names", [("y", "x"), ("x", "z"), ("x", "x")])
def test_columns_that_are_not_adjacent_are_refused_with_the_file(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"are not adjacent in points\.ply"):
        in_rows().columns(*names)


@pytest.mark.parametrize("names", [("x", "y"), ("uv",), ("x", "uv")])
def test_separate_arrays_have_no_columns(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="are not adjacent"):
        apart().columns(*names)
