"""What fills the whole window: all about a job, why it waits, the help. All pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import chop_cells
from rich.text import Text

from gpuyard.core.units import format_time
from gpuyard.ui.cli.jobs.attempt_text import memory_lines
from gpuyard.ui.cli.jobs.show import advice_lines, attempt_lines, fact_lines
from gpuyard.ui.cli.jobs.why import why_lines
from gpuyard.ui.cli.text_table import clean
from gpuyard.ui.tui.glyphs import Glyphs
from gpuyard.ui.tui.memory_bar import legend

_LAST = "environment:"
_KEYS = (
    ("up down, j k", "choose a job; PgUp PgDn by the window, Home End to either end"),
    ("Enter", "all about it: its need, its attempts, what happened to it"),
    ("w", "why it does not run, in the scheduler's words, and when it may"),
    ("l", "its log in the whole window; left and right for long lines"),
    ("c", "cancel it; you are asked first"),
    ("h, r", "hold it, release it"),
    ("+, -", "raise, lower its priority"),
    ("s, u", "suspend it (its GPU memory moves to RAM), resume it"),
    ("t", "queue it once more"),
    ("/", "only jobs with this in name, tag, command or id; Esc shows all"),
    ("f", "of what has finished: the last ones, all, or none"),
    ("p", "pause the queue, or go on; you are asked first"),
    ("[, ]", "scroll the GPUs"),
    ("q", "leave; the queue goes on without you"),
)


class WrappedText:
    """Lines of text, wrapped to a width."""

    def __init__(self, lines: Sequence[Text], width: int) -> None:
        self._lines = [part for line in lines for part in _wrap(line, width)]

    def __len__(self) -> int:
        return len(self._lines)

    def lines(self, start: int, count: int) -> list[Text]:
        return self._lines[max(0, start) : start + count]


def _wrap(line: Text, width: int) -> list[Text]:
    """At spaces where there are any; what goes on is set in a little further than the line."""
    lead = len(line.plain) - len(line.plain.lstrip())
    indent = lead + 2
    if line.cell_len <= width or width < 2 * indent:
        return [line]
    _, *bounds = (bound for piece in _pieces(line.plain, width, lead, indent) for bound in piece)
    first, *others = list(line.divide(bounds))[::2]  # every other is the space between two
    return [first, *(Text(" " * indent).append_text(other) for other in others)]


def _pieces(text: str, width: int, lead: int, indent: int) -> Iterator[tuple[int, int]]:
    """From where to where each reaches; no more is looked at for one than may be in it: a command can be very long."""
    begin, room = 0, width
    while begin < len(text):
        fits = chop_cells(text[begin : begin + 2 * width], room)[0]
        end = begin + len(fits)
        space = fits.rfind(" ", lead + 1 if begin == 0 else 1)
        if end < len(text) and space > 0:
            end = begin + space
        yield begin, end
        begin, room = end + len(text[end : end + width]) - len(text[end : end + width].lstrip()), width - indent


def about(job: Mapping[str, Any], story: Mapping[str, Any], width: int, letters: Glyphs) -> list[Text]:
    """The longest and least asked for, its environment, comes last."""
    told = dict(job)
    facts = fact_lines(told)
    lines = [_fact(line) for line in facts if not line.startswith(_LAST)]
    heading, *attempts = attempt_lines(told, width, letters.ellipsis)
    if attempts:
        lines += [Text(), Text(heading, "dim"), *map(Text, attempts)]
    lines += map(Text, memory_lines(told, width, is_unicode=letters.is_unicode))
    lines += map(Text, advice_lines(told))
    lines += [Text(), Text("what happened", "dim"), *map(Text, _story_lines(story))]
    return [*lines, Text(), *(_fact(line) for line in facts if line.startswith(_LAST))]


def _fact(line: str) -> Text:
    name, colon, value = line.partition(":")
    return Text.assemble((name + colon, "dim"), value)


def _story_lines(story: Mapping[str, Any]) -> Iterator[str]:
    for event in story["events"]:
        yield clean(f"{format_time(event['at'])}  {event['kind']}  {event['text'] or ''}").rstrip()


def why(answer: Mapping[str, Any]) -> list[Text]:
    first, *others = why_lines(dict(answer))
    return [Text(first, "bold"), *map(Text, others)]


def help_lines(letters: Glyphs) -> list[Text]:
    width = max(len(keys) for keys, _ in _KEYS)
    lines = [Text.assemble((keys.ljust(width), "bold"), f"  {what}") for keys, what in _KEYS]
    parts = Text("memory: ").append_text(legend(letters))
    explained = "own are this queue's jobs, others other leases, foreign processes without one"
    return [*lines, Text(), parts, Text(explained), Text("each block of a history is 5 seconds", "dim")]
