"""The arrays of a scene or frame for the renderer: by name, and adjacent columns as one view without a copy."""

import numpy as np
import pytest

from gpuyard.recipes.render.memory.host_memory import HostMemory
from gpuyard.recipes.render.memory.named_arrays import Arrays, Field, Layout, packed

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


def test_arrays_are_a_mapping_by_name() -> None:
    arrays = in_rows()
    assert (list(arrays), len(arrays), "x" in arrays, "w" in arrays) == (["x", "y", "z"], 3, True, False)
    assert arrays["y"].tolist() == [1, 4, 7, 10, 13]
    with pytest.raises(KeyError, match="w"):
        arrays["w"]
    assert repr(arrays) == "<Arrays of points.ply: x, y, z>"


def test_adjacent_columns_are_one_view() -> None:
    arrays = in_rows()
    columns = arrays.columns("x", "y", "z")
    assert columns.shape == (ROWS, 3)
    assert columns.tolist() == np.arange(15).reshape(5, 3).tolist()
    assert np.shares_memory(columns, arrays["y"])
    assert arrays.columns("y", "z").tolist() == [[1, 2], [4, 5], [7, 8], [10, 11], [13, 14]]
    assert arrays.columns("z").tolist() == [[2], [5], [8], [11], [14]]


def test_columns_are_new_arrays_on_every_call() -> None:
    """A renderer may change the shape or the flags of an array that it was given."""
    arrays = in_rows()
    first = arrays.columns("x", "y", "z")
    first.shape = (1, ROWS, 3)
    second = arrays.columns("x", "y", "z")
    assert second.shape == (ROWS, 3)
    assert np.shares_memory(first, second)


@pytest.mark.parametrize("names", [("y", "x"), ("x", "z"), ("x", "x")])
def test_columns_that_are_not_adjacent_are_refused_with_the_file(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"are not adjacent in points\.ply"):
        in_rows().columns(*names)


@pytest.mark.parametrize("names", [("x", "y"), ("uv",), ("x", "uv")])
def test_separate_arrays_have_no_columns(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="are not adjacent"):
        apart().columns(*names)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(KeyError, match="nx"):
        in_rows().columns("x", "nx")
