"""The actions on jobs that have a key: the states that they apply to, and the notices of their results; and the lines
around the panels: host and queue status, headings, notices, keys; and the pages that fill the window: details of a job,
why it waits, help. All pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, convert
from rich.cells import chop_cells
from rich.text import Text

from gpuyard.errors import GpuyardError
from gpuyard.model.machine_snapshot import Host
from gpuyard.model.units import UNKNOWN, format_count, format_time
from gpuyard.ui.cli.jobs.change_verbs import ACTS
from gpuyard.ui.cli.jobs.explain import detailed_lines
from gpuyard.ui.cli.jobs.job_text import FINISHED, UNFINISHED, revived_text, row_ids
from gpuyard.ui.cli.jobs.show import fact_lines, sections
from gpuyard.ui.cli.text_table import cell_width, clean, cut_middle
from gpuyard.ui.tui.device_view import legend
from gpuyard.ui.tui.queue_view import count_jobs, job_title, states_of
from gpuyard.ui.views.machine_tables import host_line

# By verb: the states in which the lifecycle allows it. The page has the same table (`ui/web/states.js`).
APPLIES: Mapping[str, frozenset[str]] = {
    "cancel": frozenset(UNFINISHED) - {"stopping"},
    "hold": frozenset({"queued", "blocked", "delayed", "pending"}),
    "release": frozenset({"held"}),
    "retry": frozenset(FINISHED),
    "suspend": frozenset({"running"}),
    "resume": frozenset({"suspended"}),
    "priority": frozenset(UNFINISHED),
}


class ActionNotice(Struct, frozen=True):
    text: str = ""
    is_bad: bool = False


def rows_for(verb: str, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if not APPLIES[verb].isdisjoint(states_of(row))]


def count_for(verb: str, rows: Sequence[Mapping[str, Any]]) -> int:
    return count_jobs(rows, APPLIES[verb].__contains__)


def name_rows(verb: str, rows: Sequence[Mapping[str, Any]], width: int) -> str:
    """Return the jobs that the action applies to, as far as they fit: `12 train.py, 18-57 lr (40 jobs) and 5 more`."""
    if len(rows) == 1:
        return ("" if rows[0].get("group") else "job ") + _name_row(verb, rows[0], width - len(" (500 jobs)"))
    fitting, most = "", (width - len(" and ")) // min(3, len(rows))
    for shown in range(1, len(rows) + 1):
        names = [_name_row(verb, row, most) for row in rows[:shown]]
        rest = count_for(verb, rows[shown:])
        *names, last = [*names, f"{rest} more"] if rest else names
        text = f"{', '.join(names)} and {last}"
        if fitting and cell_width(text) > width:
            break
        fitting = text
    return fitting


def _name_row(verb: str, row: Mapping[str, Any], width: int) -> str:
    jobs = f" ({format_count(count_for(verb, [row]), 'job')})" if row.get("group") else ""
    return cut_middle(clean(job_title(row)), width) + jobs


def describe_refusal(verb: str, rows: Sequence[Mapping[str, Any]]) -> ActionNotice:
    if len(rows) == 1:
        return ActionNotice(
            f"{verb} does not apply to job {row_ids(rows[0])}, which is {rows[0]['state']}", is_bad=True
        )
    return ActionNotice(f"{verb} applies to none of the {count_jobs(rows)} marked jobs", is_bad=True)


def describe_result(verb: str, answer: Mapping[str, Any], **more: object) -> ActionNotice:
    done, not_done = ACTS[verb]
    if answer["count"]:
        left = len(answer["unchanged"])
        unchanged = f"; {left} unchanged: {answer['unchanged'][0]['reason']}" if left else ""
        return ActionNotice(clean(f"{done.format(**more)} {answer['changed']}{revived_text(answer)}{unchanged}"))
    if not answer["unchanged"]:
        return ActionNotice("no job to change", is_bad=True)
    first = answer["unchanged"][0]
    return ActionNotice(clean(f"{first['id']} {not_done}: {first['reason']}"), is_bad=True)


def failed(error: GpuyardError) -> ActionNotice:
    return ActionNotice(clean(f"{error}{f' ({error.hint})' if error.hint else ''}"), is_bad=True)


KEYS = (
    ("Enter", "show"), ("w", "why"), ("l", "log"), ("Space", "mark"), ("c", "cancel"), ("t", "retry"), ("h", "hold"),
    ("r", "release"), ("F", "failed"), ("/", "filter"), ("+-", "priority"), ("s", "suspend"), ("u", "resume"),
    ("f", "finished"), ("a", "mark all"), ("p", "pause"),
)  # fmt: skip


def head_line(host: Mapping[str, Any], status: Mapping[str, Any], trouble: str | None, width: int) -> Text:
    paused = "paused: no new jobs start" if status.get("paused") else ""
    right = trouble or ("draining: running jobs finish" if status.get("draining") else paused)
    end = Text(f" {clean(right)} ", "bold reverse") if right else Text()
    known = convert({**host, "limited_by": None}, Host)
    left = Text.assemble(("gpuyard", "bold"), "  ", clean(host_line(known)) if host else UNKNOWN)
    left.truncate(max(0, width - end.cell_len - 1))
    left.pad_right(max(0, width - left.cell_len - end.cell_len))
    return left.append_text(end)


def rule(title: Text, right: Text, width: int) -> Text:
    """Return a heading such as `── title ───── right ──`; the title is cut if both do not fit."""
    end = Text.assemble(" ", right, (" ──", "dim")) if right.plain else Text()
    title = title.copy()
    title.truncate(max(0, width - end.cell_len - 5))
    line = Text.assemble(("── ", "dim"), title, " ")
    line.append("─" * max(0, width - line.cell_len - end.cell_len), "dim").append_text(end)
    line.truncate(width)
    return line


def keys_line(width: int, verbs: Collection[str] = ACTS) -> Text:
    """Return as many keys as fit, without actions that are not among `verbs`; help and quit are always shown."""
    last = _keys_text((("?", "help"), ("q", "quit")))
    shown = [(key, what) for key, what in KEYS if what not in ACTS or what in verbs]
    while shown and _keys_text(shown).cell_len + 2 + last.cell_len > width:
        shown.pop()
    return Text("  ").join([_keys_text(shown), last]) if shown else last


def _keys_text(keys: Sequence[tuple[str, str]]) -> Text:
    return Text("  ").join(Text.assemble((key, "bold reverse"), f" {what}") for key, what in keys)


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
