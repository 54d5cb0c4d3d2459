"""PLY files of other programs: their content is read unchanged, and errors in them are reported."""

import contextlib
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuyard.errors import AssetError
from gpuyard.recipes.render.memory.ply_file import CHUNK_NBYTES, LINE_LIMIT, describe
from tests.residency_files import FORMS, NAMES_OF_TYPES, PagedSink, Table, points, splats, write_ply

MANY = {form: 2 * CHUNK_NBYTES // 15 + 3 if form.startswith("binary") else 10_000 for form in FORMS}  # several chunks
IN_ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def read(path: Path | str, page_nbytes: int = 64, offset: int = 0) -> dict[str, npt.NDArray[Any]]:
    ply = describe(str(path))
    sink = PagedSink(offset + ply.nbytes, page_nbytes)
    ply.read(sink, offset)
    return sink.arrays(ply.layout(offset))


def assert_same(arrays: dict[str, npt.NDArray[Any]], table: Table) -> None:
    assert tuple(arrays) == table.dtype.names
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, table[name], strict=True)


def problem_with(path: Path | str) -> str:
    with pytest.raises(AssetError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    return caught.value.message.removeprefix(f"{path}: ")


@st.composite
def tables(draw: st.DrawFn) -> Table:
    names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=8)
    column = st.tuples(names, st.sampled_from(list(NAMES_OF_TYPES)))
    columns = draw(st.lists(column, min_size=1, max_size=6, unique_by=lambda one: one[0]))
    table = np.empty(draw(st.integers(1, 6)), columns)
    for name, dtype in columns:
        table[name] = draw(st.lists(_numbers(dtype), min_size=len(table), max_size=len(table)))
    return table


def _numbers(dtype: str) -> st.SearchStrategy[Any]:
    if dtype[0] == "f":
        return st.floats(width=64 if dtype == "f8" else 32)
    bounds = np.iinfo(dtype)
    return st.integers(int(bounds.min), int(bounds.max))


@IN_ONE_FOLDER
@given(
    table=tables(),
    form=st.sampled_from(FORMS),
    faces=st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=3),
    faces_first=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n"]),
    page_nbytes=st.integers(7, 64),
    offset=st.sampled_from([0, 16, 48]),
)
def test_any_table_is_read_unchanged_into_pages_of_any_size(
    tmp_path: Path, table: Table, form: str, page_nbytes: int, offset: int, *, faces_first: bool, **kinds: Any
) -> None:
    path = write_ply(tmp_path / "any.ply", table, form, faces_first=faces_first and form == "ascii", **kinds)

    assert_same(read(path, page_nbytes, offset), table)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_many_chunks_is_read_completely(tmp_path: Path, form: str) -> None:
    table = points(MANY[form])

    assert_same(read(write_ply(tmp_path / "points.ply", table, form), 1_000_003), table)


def test_the_size_is_exact_before_reading_and_adjacent_properties_stay_adjacent(tmp_path: Path) -> None:
    path = write_ply(tmp_path / "points.ply", points(1001))

    ply = describe(str(path))

    assert (ply.rows, ply.nbytes) == (1001, 12016 + 3008)  # each block rounded up to 16 bytes
    assert ply.layout().nbytes == ply.nbytes
    layout = describe(str(write_ply(tmp_path / "points.ply", points(8)))).layout(160)

    assert [(field.name, field.offset, field.strides) for field in layout.fields] == [
        *[("x", 160, (3,)), ("y", 164, (3,)), ("z", 168, (3,))],
        *[("red", 256, (3,)), ("green", 257, (3,)), ("blue", 258, (3,))],
    ]


def test_a_terabyte_file_is_described_by_reading_its_header_only(tmp_path: Path) -> None:
    path = tmp_path / "huge.ply"
    header = b"ply\nformat binary_little_endian 1.0\nelement vertex 100000000000\nproperty float x\nend_header\n"
    path.write_bytes(header)
    os.truncate(path, len(header) + 400_000_000_000)

    assert describe(str(path)).nbytes == 400_000_000_000


@pytest.mark.parametrize("form", ["binary_little_endian", "binary_big_endian"])
def test_a_binary_file_with_lists_before_its_vertices_is_refused(tmp_path: Path, form: str) -> None:
    path = write_ply(tmp_path / "mesh.ply", points(5), form, faces=[[0, 1, 2]] * 2, faces_first=True)

    assert problem_with(path) == "it has lists before its vertices"


def test_reading_needs_little_memory_beside_the_target(tmp_path: Path) -> None:
    for number, (form, table) in enumerate(
        [("binary_big_endian", splats(60_000)), ("binary_little_endian", points(800_000)), ("ascii", points(30_000))]
    ):
        ply = describe(str(write_ply(tmp_path / f"{number}.ply", table, form)))
        sink = PagedSink(ply.nbytes, 1 << 23)
        tracemalloc.start()
        ply.read(sink)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

        assert peak < 3 * CHUNK_NBYTES, form


@pytest.mark.parametrize("form", FORMS)
def test_elements_before_the_vertices_are_skipped(tmp_path: Path, form: str) -> None:
    table, is_text = points(5), form == "ascii"
    path = write_ply(tmp_path / "mesh.ply", table, form, faces=[[0, 1, 2], [], [3, 4, 0, 1]], faces_first=is_text)
    header, data = path.read_bytes().split(b"end_header\n", 1)
    before = b"element face" if is_text else b"element vertex"
    camera = b"element camera 1\nproperty uchar id\nproperty float focal\n" + before
    first = b"1 2.5\n" if is_text else b"12345"
    path.write_bytes(header.replace(before, camera) + b"end_header\n" + first + data)

    assert_same(read(path), table)


def test_remarks_in_a_header_are_ignored_and_numbers_may_have_any_notation(tmp_path: Path) -> None:
    path = tmp_path / "remarks.ply"
    path.write_bytes(
        b"ply\ncomment caf\xc3\xa9 \xff\nformat ascii 1.0\nobj_info num_cols 512\n\nelement vertex 2\n"
        b"comment element vertex 9\nproperty uchar  a\t\nend_header\n 1 \n\t2"
    )

    assert read(path)["a"].tolist() == [1, 2]
    path = tmp_path / "text.ply"
    path.write_bytes(
        b"ply\nformat ascii 1.0\nelement vertex 3\nproperty uchar a\nproperty float b\nend_header\n"
        b"255 1e3\n2e1 inf\n7.0 -nan\nthis is behind them\n"
    )

    arrays = read(path)

    assert arrays["a"].tolist() == [255, 20, 7]
    np.testing.assert_array_equal(arrays["b"], np.array([1000, np.inf, np.nan], "f4"))


def ply_text(*lines: str, vertices: str = "element vertex 1", form: str = "ascii 1.0") -> bytes:
    return "\n".join(["ply", f"format {form}", vertices, *lines]).encode()


X = "property float x"
BAD_FILES = {
    b"": "it is empty",
    b"plyformat": "it is not a PLY file",
    b"\x89PNG\r\n\x1a\n": "it is not a PLY file",
    b"ply": "it is not a PLY file",
    b"ply\n": "its header does not end before the file does",
    ply_text(X, "end_head"): "its header does not end before the file does",
    ply_text(X, "end_header"): "its header does not end before the file does",
    ply_text(X, "end_header\n"): "says 1 vertices, which need at least 1 bytes of data, but it has 0",
    b"ply\nelement vertex 1\nproperty float x\nend_header\n1\n": "its header has no format",
    b"ply\nproperty float x\nend_header\n1\n": "a line that cannot be understood: 'property float x'",
    ply_text(X, "end_header", form="ascii 2.0"): "a line that cannot be understood: 'format ascii 2.0'",
    ply_text(X, "end_header", form="binary_middle_endian 1.0"): "a line that cannot be understood",
    ply_text(X, "hello " * 40, "end_header"): "cannot be understood: 'hello hello hello hello hello hello hello hello",
    ply_text(X, "end_header\n1\n", vertices="element point 1"): "it has no element called vertex",
    ply_text(X, "end_header\n1\n", vertices="element vertex 0"): "it has no vertices",
    ply_text(X, "end_header\n1\n", vertices="element vertex -5"): "element 'vertex' has '-5' rows",
    ply_text(X, "end_header\n1\n", vertices="element vertex many"): "element 'vertex' has 'many' rows",
    ply_text(X, "end_header\n1\n", vertices="element vertex 1" + "0" * 18): "has '1000000000000000000' rows",
    ply_text(X, "end_header\n1\n", vertices="element vertex 1" + "0" * 17): "says 100,000,000,000,000,000 vertices",
    ply_text(X, "end_header\n1\n2\n", vertices="element vertex 3"): "says 3 vertices, which need at least 5 bytes",
    ply_text(X, "end_header\n1\n2 \n", vertices="element vertex 3"): "its header says 3 vertices, but it has 2",
    ply_text("end_header\n1\n"): "its vertices have no properties",
    ply_text("property quad x", "end_header\n1\n"): "a property of no known type: 'quad x'",
    ply_text("property list float int x", "end_header\n1\n"): "a property of no known type: 'list float int x'",
    ply_text("property list uchar int x", "end_header\n0\n"): "its vertices have properties that are lists",
    ply_text(X, X, "end_header\n1 2\n"): "its vertices have two properties called 'x'",
    ply_text(X, "property float y", "end_header\n1.25\n"): "vertex 1 has 1 numbers, but the header says 2",
    ply_text(X, "end_header\n1 2\n"): "vertex 1 has 2 numbers, but the header says 1",
    ply_text(X, "end_header\n\n1\n"): "vertex 1 has 0 numbers, but the header says 1",
    ply_text(X, "end_header\n1\n\n2\n", vertices="element vertex 2"): "vertex 2 has 0 numbers",
    ply_text(X, "end_header\n1\ntwo\n", vertices="element vertex 2"): "vertex 2 has 'two' in place of a number",
    ply_text(
        "property uchar x", "end_header\n256\n"
    ): "vertex 1 has 256 as its 'x', which must be an integer from 0 to 255",
    ply_text("property uchar x", "end_header\n1.5\n"): "vertex 1 has 1.5 as its 'x'",
    ply_text("property int x", "end_header\nnan\n"): "vertex 1 has nan as its 'x'",
    ply_text(X, "end_header\n" + "1" * LINE_LIMIT * 2): "it has a line of more than 4,194,304 bytes",
    ply_text(X, "end_header\n1234", vertices="element vertex 2", form="binary_little_endian 1.0"): "at least 8 bytes",
}


@pytest.mark.parametrize("content", BAD_FILES, ids=range(len(BAD_FILES)))
def test_an_error_in_a_file_is_reported_with_its_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.ply"
    path.write_bytes(content)

    assert BAD_FILES[content] in problem_with(path)


def test_a_file_of_another_format_is_not_read_completely(tmp_path: Path) -> None:
    path = tmp_path / "endless.ply"
    path.write_bytes(b"ply\ncomment ")
    os.truncate(path, 1 << 40)  # sparse: all zeros, without disk blocks

    assert problem_with(path) == "its header does not end within 1 MB"


def test_a_file_that_is_not_regular_is_reported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")

    assert problem_with(tmp_path / "gone.ply") == "there is no such file"
    assert problem_with(tmp_path) == "it is a folder"
    assert problem_with(tmp_path / "pipe") == "it is not a regular file"
    assert problem_with(tmp_path / "loop").startswith("it cannot be read: ")
    assert problem_with(f"{tmp_path}/{'n' * 300}") == "it cannot be read: File name too long"
    assert problem_with(f"{tmp_path}/a\0b").startswith("it cannot be read: ")


def test_a_file_without_read_permission_is_reported(tmp_path: Path) -> None:
    path = write_ply(tmp_path / "secret.ply", points(3))
    path.chmod(0)

    with _as_another_user():
        assert problem_with(path) == "it cannot be read: Permission denied"


@contextlib.contextmanager
def _as_another_user() -> Iterator[None]:
    """Drop root's privileges: root may read every file."""
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(me)


@pytest.mark.linux("a file that is known to fail")
def test_a_disk_that_fails_is_reported() -> None:
    assert problem_with("/proc/self/mem") == "it cannot be read: Input/output error"


@pytest.mark.linux("file names that are not UTF-8")
def test_a_skip_can_be_written_for_any_file_name(tmp_path: Path) -> None:
    with pytest.raises(AssetError) as caught:
        describe(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.ply"))

    assert caught.value.message.encode().endswith(rb"/\udcff.ply: there is no such file")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: path.unlink(), "there is no such file"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "it was changed during the run"),
        (lambda path: write_ply(path, points(5, seed=2)), "it was changed during the run"),
    ],
    ids=["gone", "truncated", "rewritten"],
)
def test_a_file_that_was_changed_is_reported(
    tmp_path: Path, form: str, change: Callable[[Path], object], problem: str
) -> None:
    path = write_ply(tmp_path / "scene.ply", points(5), form)
    os.utime(path, (1, 1))  # two writes in a row may get the same time from a coarse clock
    ply = describe(str(path))

    change(path)

    with pytest.raises(AssetError, match=problem):
        ply.read(PagedSink(ply.nbytes))


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_shrinks_while_it_is_read_is_reported(tmp_path: Path, form: str) -> None:
    class Shrinking(PagedSink):
        def views(self, offset: int, nbytes: int) -> list[memoryview]:
            os.truncate(path, 1000)
            return super().views(offset, nbytes)

    path = write_ply(tmp_path / "scene.ply", points(MANY[form]), form)
    ply = describe(str(path))

    with pytest.raises(AssetError, match=str(path)):
        ply.read(Shrinking(ply.nbytes))


def _mesh(form: str, folder: Path) -> bytes:
    return write_ply(folder / "valid.ply", points(3), form, faces=[[0, 1, 2]], faces_first=form == "ascii").read_bytes()


@IN_ONE_FOLDER
@given(
    form=st.sampled_from(FORMS),
    changes=st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3)), max_size=4),
    length=st.integers(0, 400),
)
def test_a_damaged_file_is_reported(tmp_path: Path, form: str, changes: list[tuple[int, bytes]], length: int) -> None:
    content = bytearray(_mesh(form, tmp_path))
    for place, noise in changes:
        content[place : place + len(noise)] = noise
    path = tmp_path / "damaged.ply"
    path.write_bytes(content[: max(length, 30)])

    _read_or_report(path)


def _read_or_report(path: Path) -> None:
    with contextlib.suppress(AssetError):
        arrays = read(path)
        assert len({array.shape for array in arrays.values()}) == 1
