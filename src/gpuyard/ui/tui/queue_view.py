"""The queue as lines: the visible rows of a queue of any length, the selected one, and a line for each. All pure.

A row is a job, or all runs of a sweep or an array. Rows are requested in pages of about three windows, so that the
next rows are loaded before they are scrolled to."""

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace
from rich.text import Text

from gpuyard.model.selection import format_ids
from gpuyard.ui.cli.jobs.job_text import STATES, devices_text, job_cells, job_name, result_text, row_ids
from gpuyard.ui.cli.text_table import cell_width, clean, cut, cut_middle, pad

Row = Mapping[str, Any]


class Page(Struct, frozen=True, kw_only=True):
    """Rows of the queue from `after` on; `total` is the number of all rows, as far as known."""

    after: int = 0
    rows: tuple[Row, ...] = ()
    total: int = 0

    def row(self, at: int) -> Row | None:
        place = at - self.after
        return self.rows[place] if 0 <= place < len(self.rows) else None

    def find(self, job_id: int) -> int | None:
        return next((self.after + place for place, row in enumerate(self.rows) if row["id"] == job_id), None)


class RowWindow(Struct, frozen=True, kw_only=True):
    """`top` is the first visible row, `at` the selected one, `height` the number of visible rows. A job that the user
    selected stays selected when it moves; before that, the first row is selected."""

    top: int = 0
    at: int = 0
    height: int = 1
    job_id: int | None = None
    is_followed: bool = False


def page_of(answer: Mapping[str, Any], after: int) -> Page:
    rows: Sequence[Row] = answer["jobs"]
    counted = answer.get("total")
    seen = after + len(rows) + (1 if answer.get("next") is not None else 0)
    return Page(after=after, rows=tuple(rows), total=seen if counted is None else max(counted, after + len(rows)))


def wanted(window: RowWindow, now: tuple[int, int]) -> tuple[int, int]:
    """Return start and length of the page to request; the current ones if they still cover the window."""
    after, limit = now
    if after <= window.top and window.top + window.height <= after + limit <= after + 6 * window.height:
        return now
    return max(0, window.top - window.height), 3 * window.height


def move(window: RowWindow, by: int, page: Page) -> RowWindow:
    return choose(window, max(0, min(page.total - 1, window.at + by)), page)


def choose(window: RowWindow, at: int, page: Page) -> RowWindow:
    return _select(replace(window, is_followed=at > 0), at, page)


def settle(window: RowWindow, page: Page) -> RowWindow:
    found = page.find(window.job_id) if window.is_followed and window.job_id is not None else None
    at = window.at if found is None else found
    return _select(window, max(0, min(at, page.total - 1)), page)


def _select(window: RowWindow, at: int, page: Page) -> RowWindow:
    row = page.row(at)
    lowest = max(0, page.total - window.height)
    top = max(0, min(max(window.top, at - window.height + 1), at, lowest))
    return replace(window, at=at, top=top, job_id=None if row is None else row["id"])


# What tells a row from others: the id of a job, or all ids of a sweep, such as "18-57".
RowKey: TypeAlias = int | str


def count_jobs(rows: Iterable[Row], is_counted: Callable[[str], bool] = lambda _: True) -> int:
    """Return the number of jobs that the rows stand for, in the states that count."""
    return sum(jobs for row in rows for state, jobs in states_of(row).items() if is_counted(state))


def states_of(row: Row) -> Mapping[str, int]:
    counts: Mapping[str, int] = row["group"]["counts"] if row.get("group") else {row["state"]: 1}
    return counts


def ids_text(keys: Iterable[RowKey]) -> str:
    keys = list(keys)
    sweeps = [key for key in keys if isinstance(key, str)]
    return " ".join([*sweeps, *filter(None, [format_ids([key for key in keys if isinstance(key, int)])])])


_MARK = 2
_HEADINGS = frozenset({"ID", "STATE", "JOB", "USER", "TAG", "GPU", "VRAM", "PRIO", "TIME", "WHY"})
_RIGHT = frozenset({"ID", "VRAM", "PRIO", "TIME"})
_INTERPRETER = re.compile(r"(.*/)?(python[\d.]*|bash|sh|zsh|julia|Rscript|node|ruby|perl)")


def _fit(page: Page, width: int) -> dict[str, int]:
    """Return column widths by heading, in display order. Short columns have a fixed width, so that nothing moves as
    times change; names and reasons share the rest, and arguments get what reasons do not need. Wide terminals show
    users if there are several, and tags if there are any."""
    ids = max((len(str(row_ids(row))) for row in page.rows), default=0)
    devices = [clean(devices_text(dict(row))) for row in page.rows]
    gpus = max(map(cell_width, devices), default=0)
    widest = 17 if any(":" in each for each in devices) else 10  # nvidia:0,nvidia:1
    fixed = {"ID": max(3, ids), "STATE": 12, "GPU": min(max(3, gpus), widest), "VRAM": 7, "PRIO": 4, "TIME": 7}
    if width >= 110 and len({row["user"] for row in page.rows}) > 1:
        fixed["USER"] = 10
    fixed |= value_widths(page)
    if width >= 130 and any(row["tag"] for row in page.rows):
        fixed["TAG"] = 12
    left = width - _MARK - sum(fixed.values()) - len(fixed) - 1
    if left < 20:
        left += fixed.pop("PRIO") + fixed.pop("VRAM") + 2
    longest = max((cell_width(clean(_name(row, fixed))) for row in page.rows), default=0)
    name = max(6, min(max(16, longest), left * 45 // 100))
    reason = max((cell_width(clean(result_text(dict(row)))) for row in page.rows), default=0)
    described = max((cell_width(clean(_job_text(row, fixed))) for row in page.rows), default=0)
    name = max(name, min(described, left - max(12, reason)))
    order = ("ID", *value_widths(page), "STATE", "JOB", "USER", "TAG", "GPU", "VRAM", "PRIO", "TIME", "WHY")
    widths = {**fixed, "JOB": name, "WHY": max(1, left - name)}
    return {heading: widths[heading] for heading in order if heading in widths}


def _job_line(row: Row, widths: Mapping[str, int], *, is_chosen: bool, is_marked: bool) -> Text:
    name = _name(row, widths)
    cells = {**row.get("values", {}), **job_cells(row), "JOB": _job_text(row, widths)}
    if cell_width(clean(cells["JOB"])) > widths["JOB"] < cell_width(clean(name)) + 13:
        cells["JOB"] = name
    line = Text("▶" if is_chosen else " ")
    for place, (heading, width) in enumerate(widths.items()):
        style = STATES[row["state"]][1] if heading == "STATE" and not is_chosen else None
        shorten = cut_middle if heading == "JOB" else cut
        cell = shorten(clean(cells[heading]), width)
        line.append("*" if is_marked and place == 0 else " ").append(
            pad(cell, width, is_right=heading in _RIGHT), style
        )
    if is_chosen:
        line.stylize("reverse")
    elif is_marked:
        line.stylize("bold")
    elif row["state"] in ("succeeded", "cancelled"):
        line.stylize("dim")
    return line


def queue_lines(page: Page, window: RowWindow, width: int, marked: Container[RowKey] = ()) -> list[Text]:
    """Return the column headings and the visible rows; a row that is not loaded yet is blank. `marked` are rows."""
    widths = _fit(page, width)
    headings = (pad(heading, each, is_right=heading in _RIGHT) for heading, each in widths.items())
    lines = [Text(" " * _MARK + " ".join(headings), "dim")]
    for at in range(window.top, min(window.top + window.height, page.total)):
        row = page.row(at)
        if row is None:
            lines.append(Text("  …", "dim"))
        else:
            is_marked = row_ids(row) in marked
            lines.append(_job_line(row, widths, is_chosen=at == window.at, is_marked=is_marked))
    return lines


def job_title(row: Row) -> str:
    return f"{row_ids(row)} {job_name(row)}"


def value_widths(page: Page) -> dict[str, int]:
    """Return a column for each value that varies, if all rows are runs of one sweep."""
    if len({row.get("array") for row in page.rows}) != 1 or any(row.get("group") for row in page.rows):
        return {}
    names = (name for name in page.rows[0].get("varies", ()) if name not in _HEADINGS)
    return {
        name: min(
            12,
            max(cell_width(clean(text)) for text in (name, *(row["values"].get(name, "") for row in page.rows))),
        )
        for name in names
    }


def _name(row: Row, columns: Mapping[str, int]) -> str:
    return job_name({**row, "varies": [name for name in row.get("varies", ()) if name not in columns]})


def _job_text(row: Row, columns: Mapping[str, int]) -> str:
    """Return the name and the arguments; a job without a name is its whole command."""
    name = _name(row, columns)
    return f"{name} {arguments_text(row['command'])}".rstrip() if row["name"] else name


def arguments_text(command: str) -> str:
    """Return the command without its program and, for an interpreter, without its script or module. `python -u train.py
    --lr 0.1` becomes `--lr 0.1`."""
    program, _, rest = command.strip().partition(" ")
    words = rest.split()
    if _INTERPRETER.fullmatch(program):
        script = next((at for at, word in enumerate(words) if not word.startswith("-")), len(words))
        # With -c, the word after it is a program of its own, and says what the job does.
        words = words if "-c" in words[:script] else words[script + 1 :]
    return " ".join(words)
