"""Pages that fill the window: details of a job, why it waits, help. All pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.cells import chop_cells
from rich.text import Text

from gpuyard.model.units import format_time
from gpuyard.ui.cli.jobs.explain import detailed_lines
from gpuyard.ui.cli.jobs.show import fact_lines, sections
from gpuyard.ui.cli.text_table import clean
from gpuyard.ui.tui.device_view import legend

_LAST = "environment:"
_KEYS = (
    ("up down, j k", "select a job; PgUp PgDn by page, Home End to either end"),
    ("Enter", "all details: needs, attempts, history; the runs of a sweep or an array, and Esc goes back"),
    ("w", "why it has not started, and when it may"),
    ("l", "its log in the whole window, standard error that is kept apart in magenta; left and right for long lines"),
    ("Space", "mark it, or unmark it: the keys below then act on all marked jobs and unmark them; Esc unmarks all"),
    ("a", "mark all listed jobs, the first 500; what a filter hides is unmarked"),
    ("c", "cancel it; you are asked first"),
    ("h, r", "hold it, release it"),
    ("+, -", "raise, lower its priority; marks stay"),
    ("s, u", "suspend it (its GPU memory moves to RAM), resume it"),
    ("t", "queue it again"),
    ("/", "only jobs with this in name, tag, command or id; Esc shows all"),
    ("F", "only jobs that failed; again, or Esc: all"),
    ("f", "finished jobs: the last ones, all, or none"),
    ("p", "pause or unpause the queue; you are asked first"),
    ("[, ]", "scroll the GPUs"),
    ("q", "quit; the queue keeps running"),
)


def wrap(lines: Iterable[Text], width: int) -> list[Text]:
    return [part for line in lines for part in _wrap(line, width)]


def _wrap(line: Text, width: int) -> list[Text]:
    """Wrap at spaces if possible; continuation lines are indented by two more columns."""
    lead = len(line.plain) - len(line.plain.lstrip())
    indent = lead + 2
    if line.cell_len <= width or width < 2 * indent:
        return [line]
    _, *bounds = (bound for piece in _pieces(line.plain, width, lead, indent) for bound in piece)
    first, *others = list(line.divide(bounds))[::2]  # every other is the space between two
    return [first, *(Text(" " * indent).append_text(other) for other in others)]


def _pieces(text: str, width: int, lead: int, indent: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each piece, looking ahead only as far as needed: a command can be very long."""
    begin, available = 0, width
    while begin < len(text):
        fits = chop_cells(text[begin : begin + 2 * width], available)[0]
        end = begin + len(fits)
        space = fits.rfind(" ", lead + 1 if begin == 0 else 1)
        if end < len(text) and space > 0:
            end = begin + space
        yield begin, end
        begin, available = end + len(text[end : end + width]) - len(text[end : end + width].lstrip()), width - indent


def about(job: Mapping[str, Any], history: Mapping[str, Any], width: int) -> list[Text]:
    """Return the details of a job; its environment, long and rarely needed, comes last."""
    details = dict(job)
    facts = fact_lines(details)
    lines = [_fact(line) for line in facts if not line.startswith(_LAST)]
    lines += [Text(line, style or "") for line, style in sections(details, width)]
    lines += [Text(), Text("history", "dim")]
    for event in history["events"]:
        lines.append(Text(clean(f"{format_time(event['at'])}  {event['kind']}  {event['text'] or ''}").rstrip()))
    return [*lines, Text(), *(_fact(line) for line in facts if line.startswith(_LAST))]


def _fact(line: str) -> Text:
    name, colon, value = line.partition(":")
    return Text.assemble((name + colon, "dim"), value)


def why(answer: Mapping[str, Any]) -> list[Text]:
    first, *others = detailed_lines(dict(answer))
    return [Text(first, "bold"), *map(Text, others)]


def help_lines() -> list[Text]:
    width = max(len(keys) for keys, _ in _KEYS)
    lines = [Text.assemble((keys.ljust(width), "bold"), f"  {what}") for keys, what in _KEYS]
    parts = Text("memory: ").append_text(legend())
    explained = "own: jobs of this queue; others: other leases; foreign: processes without a lease"
    return [*lines, Text(), parts, Text(explained), Text("each block of a chart is 5 seconds", "dim")]
