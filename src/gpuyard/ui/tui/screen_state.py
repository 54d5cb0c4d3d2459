"""The answers and selections behind the screen, and the lines of each panel. Knows only the size of the terminal."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

from msgspec import Struct
from msgspec.structs import replace
from rich.text import Text

from gpuyard.ui.cli.jobs.job_text import STATES, UNFINISHED, row_ids
from gpuyard.ui.cli.text_table import clean, cut
from gpuyard.ui.tui import device_view, queue_view
from gpuyard.ui.tui import job_actions as header_view
from gpuyard.ui.tui.device_view import DevicePast
from gpuyard.ui.tui.job_actions import APPLIES, ActionNotice, rows_for
from gpuyard.ui.tui.queue_view import Page, Row, RowKey, RowWindow, count_jobs, page_of, settle, wanted
from gpuyard.ui.tui.terminal_text import LogText

Answer = Mapping[str, Any]
FINISHED_SHOWN = ("the last ones", "all", "none")


class Heights(Struct, frozen=True, kw_only=True):
    """Lines of each panel with its heading; 0 hides it. `each` is the number of lines per device."""

    devices: int
    each: int
    queue: int
    log: int


def share_out(height: int, device_rows: int) -> Heights:
    """Share the height. The queue matters most: a low window drops the log first, then the devices."""
    left = max(0, height - 3)  # the header, the notice line, the keys
    most = max(2, left * 3 // 7)
    each = 2 if 2 * device_rows + 1 <= most else 1
    devices = min(max(1, each * device_rows) + 1, most) if left >= 6 else 0
    left -= devices
    log = left * 2 // 5 if left >= 8 else 0
    return Heights(devices=devices, each=each, queue=left - log, log=log)


class ScreenState:
    def __init__(self) -> None:
        self.machine: Answer = {}
        self.status: Answer = {}
        self.trouble: str | None = "connecting"
        self.silent_s = 0
        self.notice = ActionNotice()
        self.page, self.window, self.counts = Page(), RowWindow(), dict[str, int]()
        self.search, self.finished, self.only_failed = "", FINISHED_SHOWN[0], False
        # The marked rows, as they were listed last. All of them are rows of the list.
        self.marked: dict[RowKey, Row] = {}
        self.sweep: Row | None = None  # the row of the sweep or array whose runs are shown
        self.asked = (0, 0)
        self.log, self.log_note = LogText(), ""
        self.first_device = 0
        self.width, self.height = 80, 24
        self._pasts = defaultdict[str, DevicePast](DevicePast)

    def hear_devices(self, answer: Answer) -> None:
        self.machine = answer
        for device in answer.get("devices", ()):
            past = self._pasts[device["id"]]
            past.use.note(self._now(), device.get("utilization_percent"))
            past.power.note(self._now(), device.get("power_draw_w"))

    def hear_history(self, answer: Answer) -> None:
        for device_id, series in answer["devices"].items():
            past = self._pasts[device_id]
            for at, use, power in zip(series["at"], series["utilization_percent"], series["power_w"], strict=True):
                past.use.note(at, use)
                past.power.note(at, power)

    def hear_jobs(self, answer: Answer, after: int) -> None:
        self.page, self.counts = page_of(answer, after), dict(answer["counts"])
        self.window = settle(self.window, self.page)
        listed = {row_ids(row): row for row in self.page.rows}
        is_whole = after == 0 and len(listed) == self.page.total
        self.marked = {key: listed.get(key, row) for key, row in self.marked.items() if key in listed or not is_whole}

    def unmark_filtered(self, marked: Mapping[RowKey, Row], found: Iterable[Row]) -> None:
        """Unmark those of `marked` that the list does not have. `found` are the jobs that meet its conditions."""
        is_folded = self.filter_query().keys() <= {"fold", "all"}
        arrays = {row_ids(row): row["array"] for row in found}
        for key, row in marked.items():
            if row.get("group"):
                is_listed = is_folded
            elif is_folded or self.sweep is not None:
                is_listed = key in arrays and arrays[key] == (self.sweep["array"] if self.sweep else None)
            else:
                is_listed = key in arrays
            if not is_listed:
                self.marked.pop(key, None)

    def hear_priority(self, key: RowKey, priority: int) -> None:
        """Apply a new priority before the daemon's next answer, so that two key presses are two steps."""
        rows = tuple({**row, "priority": priority} if row_ids(row) == key else row for row in self.page.rows)
        self.page = replace(self.page, rows=rows)
        if key in self.marked:
            self.marked[key] = {**self.marked[key], "priority": priority}

    @property
    def chosen(self) -> Row | None:
        return self.page.row(self.window.at)

    @property
    def targets(self) -> list[Row]:
        return list(self.marked.values()) or ([] if self.chosen is None else [self.chosen])

    def known_row(self, key: RowKey) -> Row | None:
        return next((row for row in self.page.rows if row_ids(row) == key), self.marked.get(key))

    @property
    def is_filtered(self) -> bool:
        return bool(self.search or self.only_failed or self.sweep)

    def jobs_wanted(self) -> tuple[str, int]:
        """Return the target to watch for the visible rows, and the index of its first row."""
        self.asked = wanted(self.window, self.asked)
        after, limit = self.asked
        query = {"limit": str(limit), "after": str(after), **self.filter_query()}
        return f"/jobs?{urlencode(query, safe=',', quote_via=quote)}", after

    def filter_query(self) -> dict[str, str]:
        """Return the part of a request that says which jobs are listed. The daemon folds sweeps if nothing else is
        asked for."""
        query = {"ids": self.sweep["group"]["ids"]} if self.sweep is not None else {"fold": "1"}
        if self.search:
            query["search"] = self.search
        if self.only_failed:
            return {**query, "state": "failed,rejected"}
        if self.sweep is not None:
            return query
        if self.finished == "all":
            return {**query, "all": "1"}
        return {**query, "state": ",".join(UNFINISHED)} if self.finished == "none" else query

    def heights(self) -> Heights:
        return share_out(self.height, self._device_rows)

    def resize(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.window = settle(replace(self.window, height=max(1, self.heights().queue - 2)), self.page)

    def head(self) -> list[Text]:
        trouble = self.trouble or (f"no answer for {self.silent_s} s" if self.silent_s else None)
        return [header_view.head_line(self.machine.get("host") or {}, self.status, trouble, self.width)]

    def scroll_devices(self, by: int) -> None:
        heights = self.heights()
        most = max(0, self._device_rows - (heights.devices - 1) // heights.each)
        self.first_device = max(0, min(most, self.first_device + by))

    def devices(self) -> list[Text]:
        heights, columns = self.heights(), self._device_columns
        width = (self.width - device_view.BETWEEN * (columns - 1)) // columns
        frame = device_view.DeviceLayout(self._devices, width, heights.each, self._now())
        lines = [
            line
            for device in self._devices
            for line in device_view.device_lines(device, self._pasts[device["id"]], frame)
        ]
        lines = device_view.beside(lines, columns, heights.each, width)
        if not self._devices:
            lines = [Text(clean(self.machine.get("error") or ("No GPU found." if self.machine else "")))]
        available, start = max(0, heights.devices - 1), self.first_device * heights.each
        seen = lines[start : start + available]
        title = Text("GPUs", "bold")
        if len(lines) > available:
            last = (start + len(seen)) // heights.each
            title = Text.assemble(title, f" {self.first_device + 1}-{last} of {len(lines) // heights.each}  [ ]")
        return [header_view.rule(title, device_view.legend(), self.width), *seen]

    def queue(self) -> list[Text]:
        counts = [(state, self.counts[state]) for state in STATES if self.counts.get(state)]
        texts = [Text.assemble((str(count), "bold"), f" {state}") for state, count in counts]
        title = Text("Queue", "bold")
        if self.marked:
            title.append(f"  {count_jobs(self.marked.values())} marked", "bold yellow")
        if self.only_failed:
            title.append("  failed only", "yellow")
        title = Text.assemble(title, "  ", Text(" · ").join(texts))
        if self.search:
            title.append(f"  only '{clean(self.search)}'", "yellow")
        if self.sweep is not None:
            title.append(f"  only {clean(queue_view.job_title(self.sweep))}; Esc shows all", "yellow")
        top, total, last = self.window.top, self.page.total, self.window.top + self.window.height
        right = f"{top + 1}-{min(last, total)} of {total:,}" if total > self.window.height else ""
        lines = [header_view.rule(title, Text(right), self.width)]
        if not self.page.rows and not self.page.total:
            if self.trouble or not self.status:
                return lines
            if self.search:
                return [*lines, Text(f"  no job matches '{clean(self.search)}'; Esc shows all")]
            empty = "The queue is empty. Submit a job: gpuyard submit -- python train.py"
            return [*lines, Text(f"  {'No job failed; Esc shows all' if self.only_failed else empty}")]
        lines += queue_view.queue_lines(self.page, self.window, self.width, self.marked)
        return lines[: max(1, self.heights().queue)]

    def log_lines(self) -> list[Text]:
        available = self.heights().log - 1
        title = self.log_title()
        right = Text("l: full log" if title.cell_len + 24 < self.width else "")
        lines = [header_view.rule(title, right, self.width)]
        if self.log_note and not len(self.log):
            return [*lines, Text(cut(clean(self.log_note), self.width), "dim")]
        return [*lines, *self.log[max(0, len(self.log) - available) :]]

    def log_title(self) -> Text:
        row = self.chosen
        if row is None:
            return Text("Log", "bold")
        why = f"{row['state']}: {row['reason']}" if row["reason"] else row["state"]
        return Text.assemble(("Log", "bold"), clean(f"  job {queue_view.job_title(row)}  · {why}"))

    def notices(self) -> list[Text]:
        if self.notice.text:
            return [Text(cut(self.notice.text, self.width), "bold red" if self.notice.is_bad else "bold")]
        first = [f"! {notice}" for notice in self.status.get("notices") or ()][:1]
        return [Text(cut(clean(text), self.width), "yellow") for text in first] or [Text()]

    def keys(self) -> list[Text]:
        return [header_view.keys_line(self.width, frozenset(verb for verb in APPLIES if rows_for(verb, self.targets)))]

    @property
    def _devices(self) -> list[Answer]:
        return list(self.machine.get("devices") or ())

    @property
    def _device_columns(self) -> int:
        return 2 if self.width >= 160 and len(self._devices) > 2 else 1

    @property
    def _device_rows(self) -> int:
        return -(-len(self._devices) // self._device_columns)

    def _now(self) -> float:
        """Return the daemon's time, which its history uses."""
        taken_at = self.machine.get("taken_at")
        return datetime.fromisoformat(taken_at).timestamp() if taken_at else 0.0
