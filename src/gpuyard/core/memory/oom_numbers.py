"""Parse the numbers of an out-of-memory error: requested, free, total and held memory, and the device.

Each library words them differently, and most give only some: a missing number is None. Sizes are in bytes or in units
of 1,024, whatever the unit is called; that is what all of these libraries mean by it.
"""

import re
from collections.abc import Sequence
from math import prod

from msgspec import Struct

_NUMBER = r"(\d{1,3}(?:,\d{3}){1,6}|\d{1,20}(?:\.\d{1,9})?)"
_SIZE = _NUMBER + r"\s?(bytes|[KMGTP]i?B?|B)(?![a-z])"
_MB_PER_UNIT = {"B": 2.0**-20, "K": 2.0**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20, "P": 2.0**30}
# A petabyte or more is an overflow, or a mistake in a shape: no card has it, and no need should grow to it.
_ABSURD_MB = 2.0**30


def _patterns(*texts: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(text, re.IGNORECASE | re.ASCII) for text in texts)


_ASKED = _patterns(
    rf"\b(?:alloc|allocate|allocating|calloc|request for|allocation of)\s{_SIZE}",
    r"\bof size (\d{1,20})(?![\d.])()",
    rf"\bmemory utilization \([\d.]{{1,9}}, {_SIZE}",
)
_FREE = _patterns(
    rf"\bof which {_SIZE} is free\b",
    rf"; {_SIZE} free\b",
    rf"\bavailable memory is only {_SIZE}",
    rf"\bon device [^(]{{0,20}}\({_NUMBER}/[\d.]{{1,12}} (GiB)\)",
)
_TOTAL = _patterns(
    rf"\btotal capac[a-z]{{0,3}}ty of {_SIZE}",  # PyTorch wrote "capacty" for years
    rf"\b{_SIZE} total capacity\b",
    rf"\bmax allowed: {_SIZE}",
    rf"\bon device [^(]{{0,20}}\([\d.]{{1,12}}/{_NUMBER} (GiB)\)",
)
_HELD = _patterns(
    rf"\bthis process has {_SIZE} memory in use\b",
    rf"; {_SIZE} reserved in total\b",
    rf"; {_SIZE} already allocated\b",
    rf"\bMPS allocated: {_SIZE}",
    rf"\ballocated so far: {_SIZE}",
    rf"\(total {_SIZE}\)",
)
_HELD_IN_PARTS = _patterns(
    rf"\b{_SIZE} is allocated by PyTorch, and {_SIZE} is reserved by PyTorch but unallocated\b",
)[0]
_INDEX = _patterns(
    r"\bGPU[ :_](\d{1,3})(?!\d)",
    r"\bdevice (?:ordinal )?(\d{1,3})(?![\d.])",
    r"\b(?:cuda|hip|xpu):(\d{1,3})(?!\d)",
    r"\b(?:CUDA|ROCm|Vulkan|SYCL)(\d{1,2}) buffer\b",
)
_TENSOR = re.compile(r"\bshape ?\[([\d,]{1,200})\] and type (\w{1,20})", re.ASCII)
_BYTES_PER_TYPE = {
    "bool": 1, "int8": 1, "uint8": 1, "half": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "float": 4, "int32": 4,
    "uint32": 4, "double": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


class OomNumbers(Struct, frozen=True, kw_only=True):
    asked_mb: float | None = None
    free_mb: float | None = None
    total_mb: float | None = None
    held_mb: float | None = None
    device_index: int | None = None


def read(line: str) -> OomNumbers:
    index = _first(_INDEX, line)
    return OomNumbers(
        asked_mb=_first_size(_ASKED, line) or _tensor_mb(line),
        free_mb=_first_size(_FREE, line),
        total_mb=_first_size(_TOTAL, line),
        held_mb=_held_mb(line),
        device_index=None if index is None else int(index[1]),
    )


def _first(patterns: Sequence[re.Pattern[str]], line: str) -> re.Match[str] | None:
    return next((match for pattern in patterns if (match := pattern.search(line)) is not None), None)


def _first_size(patterns: Sequence[re.Pattern[str]], line: str) -> float | None:
    match = _first(patterns, line)
    return None if match is None else _megabytes(match[1], match[2])


def _held_mb(line: str) -> float | None:
    held = _first_size(_HELD, line)
    match = _HELD_IN_PARTS.search(line)
    if held is not None or match is None:
        return held
    return (_megabytes(match[1], match[2]) or 0.0) + (_megabytes(match[3], match[4]) or 0.0)


def _tensor_mb(line: str) -> float | None:
    """Return the size of the tensor that TensorFlow names in place of a size."""
    match = _TENSOR.search(line)
    each = _BYTES_PER_TYPE.get(match[2]) if match is not None else None
    if match is None or each is None:
        return None
    whole = prod(int(side) for side in match[1].split(",") if side) * each
    return whole / 2**20 if whole < _ABSURD_MB * 2**20 else None


def _megabytes(number: str, unit: str) -> float | None:
    megabytes = float(number.replace(",", "")) * _MB_PER_UNIT[(unit or "B")[0].upper()]
    return megabytes if megabytes < _ABSURD_MB else None
