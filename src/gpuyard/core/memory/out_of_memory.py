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

from msgspec import Struct
from msgspec.structs import asdict

from gpuyard.core.memory import oom_numbers, oom_patterns
from gpuyard.core.memory.oom_numbers import OomNumbers
from gpuyard.core.memory.oom_patterns import OomPattern

_LAST_LINES = 200
_MOST_CHARS = 1 << 17
_NEARBY_LINES = 20
_SAYS_CHARS = 300
_LEAD_CHARS = 80
_KILLED = 137  # 128 and SIGKILL
_NEARLY_ALL = 0.9

# Colours, and the prefixes that launchers add to each line: `[rank0]: `, `[default1]:`, `(train pid=17) `.
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_PREFIX = re.compile(r"^\s{0,8}(?:\[[a-z]{0,10}\d{1,5}\]:|\(\w{1,60} pid=\d{1,9}[^)]{0,60}\)) ?")
_TRACEBACK = "Traceback (most recent call last):"
_NO_NEW_FAILURE = (
    "During handling of the above exception",
    "was the direct cause of the following exception",
    "Exception ignored in",
    "Exception in thread",
    "--- Logging error ---",
)
_ERROR = re.compile(r"([A-Za-z_][\w.]{0,200})(?:: |:?\s*$)")
_OTHER_ERRORS = frozenset({
    "ArithmeticError", "AssertionError", "AttributeError", "FileExistsError", "FileNotFoundError", "FloatingPointError",
    "ImportError", "IndentationError", "IndexError", "IsADirectoryError", "JSONDecodeError", "KeyError",
    "KeyboardInterrupt", "ModuleNotFoundError", "NameError", "NotADirectoryError", "NotImplementedError",
    "OverflowError", "PermissionError", "RecursionError", "SyntaxError", "TypeError", "UnboundLocalError",
    "UnicodeDecodeError", "UnicodeEncodeError", "UnpicklingError", "ValueError", "ZeroDivisionError",
})  # fmt: skip


class ShortageKind(StrEnum):
    DEVICE = "device"
    HOST = "host"


class Shortage(Struct, frozen=True, kw_only=True):
    """What ran out: the error line (`says`) and its numbers; None where it gives none.

    held_mb: the memory that the program itself held at that moment.
    """

    where: ShortageKind
    says: str
    asked_mb: float | None = None
    free_mb: float | None = None
    total_mb: float | None = None
    held_mb: float | None = None
    device_index: int | None = None
    framework: str | None = None


def recognise(text: str) -> Shortage | None:
    """Return the shortage that the end of a failed program's output reports, or None."""
    last = text[-_MOST_CHARS:].splitlines()[-_LAST_LINES:]
    lines = [_PREFIX.sub("", _COLOUR.sub("", line), count=1) for line in last]
    for at in range(len(lines) - 1, -1, -1):
        found = oom_patterns.find(lines[at])
        if found is None:
            continue
        pattern, place = found
        if any(_overrules(error, pattern) for error in _errors_after(lines, at)):
            return None
        return Shortage(
            where=ShortageKind.HOST if pattern.is_host else ShortageKind.DEVICE,
            says=_shortened(lines[at], place),
            framework=pattern.framework,
            **asdict(_numbers(lines, at, pattern)),
        )
    return None


def killed_by_kernel(
    status: int | None,
    kills_before: int | None,
    kills_after: int | None,
    ram_peak_mb: float | None,
    ram_total_mb: float | None,
) -> Shortage | None:
    """Return the shortage behind a SIGKILL that we did not send, or None without evidence of one.

    The evidence is the kernel's count of out-of-memory kills, or a program that held nearly all RAM: kills by another
    guard, such as systemd-oomd, are not in the count.
    """
    if status != _KILLED:
        return None
    is_counted = kills_before is not None and kills_after is not None and kills_after > kills_before
    is_full = ram_peak_mb is not None and bool(ram_total_mb) and ram_peak_mb >= _NEARLY_ALL * (ram_total_mb or 0.0)
    if not is_counted and not is_full:
        return None
    why = "the kernel's out-of-memory killer ended it" if is_counted else "it was killed when it held nearly all memory"
    return Shortage(
        where=ShortageKind.HOST, says=why, held_mb=ram_peak_mb, total_mb=ram_total_mb, framework="the kernel"
    )


def _errors_after(lines: Sequence[str], at: int) -> Iterator[str]:
    """Yield the error lines of tracebacks that start after the line `at` and are failures of their own."""
    for header in range(at + 1, len(lines)):
        if _TRACEBACK in lines[header] and not _is_consequence(lines, header):
            error = next((line for line in lines[header + 1 :] if line and not line[0].isspace()), None)
            if error is not None:
                yield error


def _is_consequence(lines: Sequence[str], header: int) -> bool:
    before = next((line for line in reversed(lines[:header]) if line.strip()), "")
    return any(sentence in before for sentence in _NO_NEW_FAILURE)


def _overrules(error: str, pattern: OomPattern) -> bool:
    match = _ERROR.match(error)
    if match is None:
        return False
    if pattern.is_notice:
        return not oom_patterns.CONSEQUENCES.search(error)
    return match[1].rpartition(".")[2] in _OTHER_ERRORS


def _numbers(lines: Sequence[str], at: int, pattern: OomPattern) -> OomNumbers:
    numbers = oom_numbers.read(lines[at])
    if numbers.asked_mb is not None:
        return numbers
    for line in reversed(lines[max(0, at - _NEARBY_LINES + 1) : at]):
        found = oom_patterns.find(line)
        if found is not None and found[0].is_host == pattern.is_host:
            before = oom_numbers.read(line)
            if before.asked_mb is not None:
                return before
    return numbers


def _shortened(line: str, at: int) -> str:
    """Return the line, printable and shortened around the match."""
    start = max(0, at - _LEAD_CHARS) if len(line) > _SAYS_CHARS else 0
    part = line[start : start + 2 * _SAYS_CHARS]
    text = " ".join("".join(char if char.isprintable() else " " for char in part).split())
    return text if len(text) <= _SAYS_CHARS else f"{text[: _SAYS_CHARS - 1]}…"
