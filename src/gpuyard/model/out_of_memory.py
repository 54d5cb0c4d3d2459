"""Decide whether a failed program ran out of memory, from the end of its output and its exit status.

Only for attempts that failed: a program that caught the error and succeeded has lost nothing.

The rules, in the order in which they apply:
1. Only the last 200 lines count. The program survived what it wrote earlier.
2. The last line that matches a pattern (`oom_patterns`) is the cause. Where it has no numbers, those of a matching line
   shortly before it are used.
3. It does not count if a traceback that starts after it ends in a plainly different error: a mistake in the program
   (ValueError, KeyError, …), a missing file, a KeyboardInterrupt. A RuntimeError or an unknown error does not overrule
   it, as launchers, worker pools and sibling ranks report a death with these.
4. Any such traceback overrules a notice (an allocator that retries with less), unless it ends in an error that is known
   to follow from a full device.
5. A traceback that Python chains to the previous one ("During handling …", "… direct cause …") is a consequence. A
   traceback that was ignored, or ended only a thread, did not end the program.

When in doubt the program ran out of memory: another run with more memory costs a run, and no other run costs the job.
"""

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from math import prod

from msgspec import Struct

from gpuyard.model import oom_patterns
from gpuyard.model.lazy_pattern import LazyPattern
from gpuyard.model.oom_patterns import OomPattern
from gpuyard.model.terminal_line import without_prefix

_LAST_LINES = 200
_MOST_CHARS = 1 << 17
_NEARBY_LINES = 20
_SAYS_CHARS = 300
_LEAD_CHARS = 80
KILLED = 137  # 128 and SIGKILL
_NEARLY_ALL = 0.9

_COLOUR = LazyPattern(r"\x1b\[[0-9;]{0,20}m")
_TRACEBACK = "Traceback (most recent call last):"
_NO_NEW_FAILURE = (
    "During handling of the above exception",
    "was the direct cause of the following exception",
    "Exception ignored in",
    "Exception in thread",
    "--- Logging error ---",
)
_ERROR = LazyPattern(r"([A-Za-z_][\w.]{0,200})(?:: |:?\s*$)")
_OTHER_ERRORS = frozenset({
    "ArithmeticError", "AssertionError", "AttributeError", "FileExistsError", "FileNotFoundError", "FloatingPointError",
    "ImportError", "IndentationError", "IndexError", "IsADirectoryError", "JSONDecodeError", "KeyError",
    "KeyboardInterrupt", "ModuleNotFoundError", "NameError", "NotADirectoryError", "NotImplementedError",
    "OverflowError", "PermissionError", "RecursionError", "SyntaxError", "TypeError", "UnboundLocalError",
    "UnicodeDecodeError", "UnicodeEncodeError", "UnpicklingError", "ValueError", "ZeroDivisionError",
})  # fmt: skip

# Numbers: each library words them differently, and most give only some. Sizes are in bytes or in units of 1,024,
# whatever the unit is called; that is what all of these libraries mean by it.
_NUMBER = r"(\d{1,3}(?:,\d{3}){1,6}|\d{1,20}(?:\.\d{1,9})?)"
_SIZE = _NUMBER + r"\s?(bytes|[KMGTP]i?B?|B)(?![a-z])"
_MB_PER_UNIT = {"B": 2.0**-20, "K": 2.0**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20, "P": 2.0**30}
# A petabyte or more is an overflow, or a mistake in a shape: no card has it, and no need should grow to it.
_ABSURD_MB = 2.0**30


def _patterns(*texts: str) -> tuple[LazyPattern, ...]:
    return tuple(LazyPattern(text, re.IGNORECASE | re.ASCII) for text in texts)


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
_TENSOR = LazyPattern(r"\bshape ?\[([\d,]{1,200})\] and type (\w{1,20})", re.ASCII)
_BYTES_PER_TYPE = {
    "bool": 1, "int8": 1, "uint8": 1, "half": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "float": 4, "int32": 4,
    "uint32": 4, "double": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


class ShortageKind(StrEnum):
    DEVICE = "device"
    HOST = "host"


class Shortage(Struct, frozen=True, kw_only=True):
    """What ran out: the error line (`says`) and its numbers; None where it gives none."""

    where: ShortageKind
    says: str
    asked_mb: float | None = None
    free_mb: float | None = None
    total_mb: float | None = None
    held_mb: float | None = None  # the memory that the program itself held at that moment
    device_index: int | None = None
    framework: str | None = None


class RamLimit(Struct, frozen=True, kw_only=True):
    """The limit of RAM of an attempt, how many of its processes the kernel ended at it, and its peak."""

    limit_mb: float | None
    kills: int = 0
    peak_mb: float | None = None


def recognise(text: str) -> Shortage | None:
    """Return the shortage that the end of a failed program's output reports, or None."""
    last = text[-_MOST_CHARS:].splitlines()[-_LAST_LINES:]
    lines = [without_prefix(_COLOUR.sub("", line)) for line in last]
    for at in range(len(lines) - 1, -1, -1):
        found = oom_patterns.find(lines[at])
        if found is None:
            continue
        pattern, place = found
        if any(_overrules(error, pattern) for error in _errors_after(lines, at)):
            return None
        numbers = _line_with_numbers(lines, at, pattern)
        index = _first(_INDEX, numbers)
        return Shortage(
            where=ShortageKind.HOST if pattern.is_host else ShortageKind.DEVICE,
            says=_shortened(lines[at], place),
            asked_mb=_asked_mb(numbers),
            free_mb=_first_size(_FREE, numbers),
            total_mb=_first_size(_TOTAL, numbers),
            held_mb=_held_mb(numbers),
            device_index=None if index is None else int(index[1]),
            framework=pattern.framework,
        )
    return None


def killed_by_kernel(
    status: int | None,
    kills_before: int | None,
    kills_after: int | None,
    ram_peak_mb: float | None,
    ram_total_mb: float | None,
) -> Shortage | None:
    """Return the shortage behind a SIGKILL that we did not send, or None without evidence of one. The evidence is the
    kernel's count of out-of-memory kills, or a program that held nearly all RAM: kills by another guard, such as
    systemd-oomd, are not in the count."""
    if status != KILLED:
        return None
    is_counted = kills_before is not None and kills_after is not None and kills_after > kills_before
    is_full = ram_peak_mb is not None and bool(ram_total_mb) and ram_peak_mb >= _NEARLY_ALL * (ram_total_mb or 0.0)
    if not is_counted and not is_full:
        return None
    why = "the kernel's out-of-memory killer ended it" if is_counted else "it was killed when it held nearly all memory"
    return Shortage(
        where=ShortageKind.HOST, says=why, held_mb=ram_peak_mb, total_mb=ram_total_mb, framework="the kernel"
    )


def ended_at_limit(limit: RamLimit | None) -> Shortage | None:
    """Return the shortage of an attempt that the kernel ended at its own limit; None if it did not. That says nothing
    about the RAM of the machine."""
    if limit is None or not limit.kills:
        return None
    says = "the kernel ended it at its limit of RAM (--ram), out of memory"
    return Shortage(
        where=ShortageKind.HOST, says=says, held_mb=limit.peak_mb, total_mb=limit.limit_mb, framework="the kernel"
    )


def _errors_after(lines: Sequence[str], at: int) -> Iterator[str]:
    """Yield the error lines of tracebacks that start after the line `at` and are failures of their own."""
    for header in range(at + 1, len(lines)):
        if _TRACEBACK not in lines[header]:
            continue
        before = next((line for line in reversed(lines[:header]) if line.strip()), "")
        error = next((line for line in lines[header + 1 :] if line and not line[0].isspace()), None)
        if error is not None and not any(sentence in before for sentence in _NO_NEW_FAILURE):
            yield error


def _overrules(error: str, pattern: OomPattern) -> bool:
    match = _ERROR.match(error)
    if match is None:
        return False
    if pattern.is_notice:
        return not oom_patterns.CONSEQUENCES.search(error)
    return match[1].rpartition(".")[2] in _OTHER_ERRORS


def _line_with_numbers(lines: Sequence[str], at: int, pattern: OomPattern) -> str:
    """Return the line at `at`; where it does not say how much was requested, a matching line before it that does."""
    if _asked_mb(lines[at]) is not None:
        return lines[at]
    for line in reversed(lines[max(0, at - _NEARBY_LINES + 1) : at]):
        found = oom_patterns.find(line)
        if found is not None and found[0].is_host == pattern.is_host and _asked_mb(line) is not None:
            return line
    return lines[at]


def _shortened(line: str, at: int) -> str:
    """Return the line, printable and shortened around the match."""
    start = max(0, at - _LEAD_CHARS) if len(line) > _SAYS_CHARS else 0
    part = line[start : start + 2 * _SAYS_CHARS]
    text = " ".join("".join(char if char.isprintable() else " " for char in part).split())
    return text if len(text) <= _SAYS_CHARS else f"{text[: _SAYS_CHARS - 1]}…"


def _first(patterns: Sequence[LazyPattern], line: str) -> re.Match[str] | None:
    return next((match for pattern in patterns if (match := pattern.search(line)) is not None), None)


def _first_size(patterns: Sequence[LazyPattern], line: str) -> float | None:
    match = _first(patterns, line)
    return None if match is None else _megabytes(match[1], match[2])


def _held_mb(line: str) -> float | None:
    held = _first_size(_HELD, line)
    match = _HELD_IN_PARTS.search(line)
    if held is not None or match is None:
        return held
    return (_megabytes(match[1], match[2]) or 0.0) + (_megabytes(match[3], match[4]) or 0.0)


def _asked_mb(line: str) -> float | None:
    return _first_size(_ASKED, line) or _tensor_mb(line)


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
