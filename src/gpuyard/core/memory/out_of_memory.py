"""Whether a program that failed had run out of memory, from what it wrote last and how it ended.

Ask only about attempts that failed: a program that caught the error and went on to succeed has lost nothing.

The rule, in the order it is applied:
1. Only the last 200 lines count. What a program said earlier it has survived.
2. The last line that has one of the known forms (`oom_forms`) is what happened. Where it gives no figures, a line of a
   known form shortly before it does.
3. It does not count when a traceback that begins after it ends in an error which is plainly another one: a mistake in
   the program (ValueError, KeyError, …), a missing file, a KeyboardInterrupt. A RuntimeError or an unknown error does
   not take it back, as launchers, worker pools and sibling ranks tell of a death in these.
4. A notice (an allocator that will try with less) is taken back by any such traceback, unless that ends in an error
   that is known to follow from a full device.
5. A traceback that Python chains to the one before ("During handling …", "… direct cause …") is a consequence. One that
   was ignored, or ended only a thread, is no end of the program.

When in doubt it is out of memory: trying again with more room costs a run, and not trying costs the job.
"""

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum

from msgspec import Struct

from gpuyard.core.memory import oom_numbers, oom_patterns
from gpuyard.core.memory.oom_numbers import OomNumbers
from gpuyard.core.memory.oom_patterns import OomMatch

_LAST_LINES = 200
_MOST_CHARS = 1 << 17
_NEARBY_LINES = 20
_SAYS_CHARS = 300
_LEAD_CHARS = 80
_KILLED = 137  # 128 and SIGKILL
_NEARLY_ALL = 0.9

# Colours, and the names that launchers put before each line: `[rank0]: `, `[default1]:`, `(train pid=17) `.
_DECORATION = re.compile(r"\x1b\[[0-9;]{0,20}m")
_SPEAKER = re.compile(r"^\s{0,8}(?:\[[a-z]{0,10}\d{1,5}\]:|\(\w{1,60} pid=\d{1,9}[^)]{0,60}\)) ?")
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
    """What ran out, in whose words. `held_mb` is what the program itself held by then; what nobody said is `None`."""

    where: ShortageKind
    says: str
    asked_mb: float | None = None
    free_mb: float | None = None
    total_mb: float | None = None
    held_mb: float | None = None
    device_index: int | None = None
    framework: str | None = None


def recognise(text: str) -> Shortage | None:
    """From the end of what a failed program wrote; `None` where that does not speak of memory."""
    lines = [_undecorated(line) for line in text[-_MOST_CHARS:].splitlines()[-_LAST_LINES:]]
    at, found = _last_form(lines)
    if found is None or any(_takes_back(error, found) for error in _errors_after(lines, at)):
        return None
    return _shortage(lines[at], found, _figures(lines, at, found))


def killed_by_kernel(
    status: int | None,
    kills_before: int | None,
    kills_after: int | None,
    ram_peak_mb: float | None,
    ram_total_mb: float | None,
) -> Shortage | None:
    """Whether a SIGKILL that was not ours came for want of memory; without any evidence it did not.

    The evidence is the kernel's own count of such kills, or a program that held nearly all there was: somebody else's
    guard, such as systemd-oomd, is not in the count.
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


def _undecorated(line: str) -> str:
    return _SPEAKER.sub("", _DECORATION.sub("", line), count=1) if line else line


def _last_form(lines: Sequence[str]) -> tuple[int, OomMatch | None]:
    for at in range(len(lines) - 1, -1, -1):
        found = oom_patterns.find(lines[at])
        if found is not None:
            return at, found
    return 0, None


def _errors_after(lines: Sequence[str], at: int) -> Iterator[str]:
    """The last lines of the tracebacks that begin after that line and are failures of their own."""
    for header in range(at + 1, len(lines)):
        if _TRACEBACK in lines[header] and not _is_consequence(lines, header):
            error = next((line for line in lines[header + 1 :] if line and not line[0].isspace()), None)
            if error is not None:
                yield error


def _is_consequence(lines: Sequence[str], header: int) -> bool:
    before = next((line for line in reversed(lines[:header]) if line.strip()), "")
    return any(sentence in before for sentence in _NO_NEW_FAILURE)


def _takes_back(error: str, found: OomMatch) -> bool:
    match = _ERROR.match(error)
    if match is None:
        return False
    if found.form.is_notice:
        return not oom_patterns.may_follow(error)
    return match[1].rpartition(".")[2] in _OTHER_ERRORS


def _figures(lines: Sequence[str], at: int, last: OomMatch) -> OomNumbers:
    figures = oom_numbers.read(lines[at])
    if figures.asked_mb is not None:
        return figures
    for earlier in range(at - 1, max(-1, at - _NEARBY_LINES), -1):
        found = oom_patterns.find(lines[earlier])
        if found is not None and found.form.is_host == last.form.is_host:
            told = oom_numbers.read(lines[earlier])
            if told.asked_mb is not None:
                return told
    return figures


def _shortage(line: str, found: OomMatch, figures: OomNumbers) -> Shortage:
    return Shortage(
        where=ShortageKind.HOST if found.form.is_host else ShortageKind.DEVICE,
        says=_tidied(line, found.at),
        asked_mb=figures.asked_mb,
        free_mb=figures.free_mb,
        total_mb=figures.total_mb,
        held_mb=figures.held_mb,
        device_index=figures.device_index,
        framework=found.form.framework,
    )


def _tidied(line: str, at: int) -> str:
    """On one line, printable, and no longer than a person will read; the part that counts is in it."""
    start = max(0, at - _LEAD_CHARS) if len(line) > _SAYS_CHARS else 0
    part = line[start : start + 2 * _SAYS_CHARS]
    words = " ".join("".join(char if char.isprintable() else " " for char in part).split())
    return words if len(words) <= _SAYS_CHARS else f"{words[: _SAYS_CHARS - 1]}…"
