"""Parse the vertices of PLY files that are text. Every mistake is an AssetError that names the vertex."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuyard.errors import AssetError

Numbers = np.ndarray[Any, np.dtype[np.float64]]


def parse_rows(path: str, lines: list[str], first: int, columns: int) -> Numbers:
    """Return all numbers as float64, which holds the numbers of every PLY type exactly."""
    try:
        if not lines[0].strip():
            raise ValueError("a line is blank")  # numpy skips blank lines, and warns if all are blank
        table = np.loadtxt(lines, np.float64, comments=None, ndmin=2)
        if table.shape != (len(lines), columns):
            raise ValueError(f"{len(lines)} lines are {table.shape[0]} rows of {table.shape[1]} numbers")
    except ValueError as error:
        raise AssetError(path, _find_mistake(lines, first, columns) or str(error)) from error
    return table


def _find_mistake(lines: list[str], first: int, columns: int) -> str | None:
    for row, line in enumerate(lines, first + 1):
        numbers = line.split()
        if len(numbers) != columns:
            return f"vertex {row:,} has {len(numbers)} numbers, but the header says {columns}"
        for number in numbers:
            try:
                float(number)
            except ValueError:
                return f"vertex {row:,} has {number[:60]!r} in place of a number"
    return None


def as_type(path: str, values: Numbers, dtype: str, names: Sequence[str], first: int) -> np.ndarray[Any, Any]:
    """Return the values as `dtype`. Raises AssetError if an integer does not fit. `first`: rows before these."""
    with np.errstate(all="ignore"):
        if dtype[0] == "f":
            return np.ascontiguousarray(values, dtype)
        bounds = np.iinfo(dtype)
        fits = (values >= bounds.min) & (values <= bounds.max) & (values == np.trunc(values))
        if fits.all():
            return np.ascontiguousarray(values, dtype)
    row, column = np.argwhere(~fits)[0]
    raise AssetError(
        path,
        f"vertex {first + row + 1:,} has {values[row, column]:.15g} as its {names[column]!r}, "
        f"which must be an integer from {bounds.min:,} to {bounds.max:,}",
    )
