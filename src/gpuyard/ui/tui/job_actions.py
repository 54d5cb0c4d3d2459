"""The actions on jobs that have a key: the states that they apply to, and the notices of their results; and the lines
around the panels: host and queue status, headings, notices, keys. All pure.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct, convert
from rich.text import Text

from gpuyard.errors import GpuyardError
from gpuyard.model.machine_snapshot import Host
from gpuyard.model.units import UNKNOWN, format_count
from gpuyard.ui.cli.jobs.job_text import FINISHED, UNFINISHED, revived_text, row_ids
from gpuyard.ui.cli.text_table import cell_width, clean, cut_middle
from gpuyard.ui.tui.queue_view import count_jobs, job_title, states_of
from gpuyard.ui.views.machine_tables import host_line

# By verb: what precedes the ids that changed, and what follows the id of a job that did not.
ACTS = {
    "cancel": ("cancelled", "is not cancelled"),
    "hold": ("held", "is not held"),
    "release": ("released", "is not released"),
    "retry": ("queued again", "is not queued again"),
    "suspend": ("suspending", "is unchanged"),
    "resume": ("will resume when memory is free:", "is unchanged"),
    "priority": ("priority {priority} for", "keeps its priority"),
}

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
    """The text of the notice line."""

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
