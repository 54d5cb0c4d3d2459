"""The answers and selections behind the screen, and the lines of each panel. Knows only the size of the terminal."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote

from msgspec.structs import replace
from rich.text import Text

from gpuyard.ui.cli.jobs.job_text import UNFINISHED
from gpuyard.ui.cli.text_table import clean, cut
from gpuyard.ui.tui import device_view, header_view, memory_bar, queue_view
from gpuyard.ui.tui.device_view import DevicePast
from gpuyard.ui.tui.glyphs import Glyphs
from gpuyard.ui.tui.job_actions import ActionNotice
from gpuyard.ui.tui.log_text import LogText
from gpuyard.ui.tui.panel_heights import Heights, device_columns, share_out
from gpuyard.ui.tui.row_window import Page, Row, RowWindow, page_of, settle, wanted
from gpuyard.ui.tui.sparkline import SparklineSeries

Answer = Mapping[str, Any]
FINISHED_SHOWN = ("the last ones", "all", "none")


class ScreenState:
    def __init__(self, glyphs: Glyphs) -> None:
        self.glyphs = glyphs
        self.machine: Answer = {}
        self.status: Answer = {}
        self.trouble: str | None = "connecting"
        self.silent_s = 0
        self.notice = ActionNotice()
        self.page, self.window, self.counts = Page(), RowWindow(), dict[str, int]()
        self.search, self.finished = "", FINISHED_SHOWN[0]
        self.asked = (0, 0)
        self.log, self.log_note = LogText(), ""
        self.first_device = 0
        self.width, self.height = 80, 24
        self._pasts: dict[str, DevicePast] = {}

    # Answers

    def hear_devices(self, answer: Answer) -> None:
        self.machine = answer
        for device in answer.get("devices", ()):
            past = self._past(device["id"])
            past.use.note(self._now(), device.get("utilization_percent"))
            past.power.note(self._now(), device.get("power_draw_w"))

    def hear_history(self, answer: Answer) -> None:
        for device_id, series in answer["devices"].items():
            past = self._past(device_id)
            past.use.note_all(zip(series["at"], series["utilization_percent"], strict=True))
            past.power.note_all(zip(series["at"], series["power_w"], strict=True))

    def hear_jobs(self, answer: Answer, after: int) -> None:
        self.page, self.counts = page_of(answer, after), dict(answer["counts"])
        self.window = settle(self.window, self.page)

    def hear_priority(self, job_id: int, priority: int) -> None:
        """Apply a new priority before the daemon's next answer, so that two key presses are two steps."""
        rows = tuple({**row, "priority": priority} if row["id"] == job_id else row for row in self.page.rows)
        self.page = replace(self.page, rows=rows)

    # Requests

    @property
    def chosen(self) -> Row | None:
        return self.page.row(self.window.at)

    def jobs_wanted(self) -> tuple[str, int]:
        """Return the target to watch for the visible rows, and the index of its first row."""
        self.asked = wanted(self.window, self.asked)
        after, limit = self.asked
        query = {"limit": str(limit), "after": str(after)}
        if self.search:
            query["search"] = self.search
        if self.finished == "all":
            query["all"] = "1"
        elif self.finished == "none":
            query["state"] = ",".join(UNFINISHED)
        return "/jobs?" + "&".join(f"{name}={quote(value, safe=',')}" for name, value in query.items()), after

    # Lines

    def heights(self) -> Heights:
        rows = -(-len(self._devices) // device_columns(self.width, len(self._devices)))
        return share_out(self.height, rows)

    def resize(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.window = settle(replace(self.window, height=max(1, self.heights().queue - 2)), self.page)

    def head(self) -> list[Text]:
        trouble = self.trouble or (f"no answer for {self.silent_s} s" if self.silent_s else None)
        return [header_view.head_line(self.machine.get("host") or {}, self.status, trouble, self.width)]

    def scroll_devices(self, by: int) -> None:
        heights = self.heights()
        rows = -(-len(self._devices) // device_columns(self.width, len(self._devices)))
        most = max(0, rows - (heights.devices - 1) // heights.each)
        self.first_device = max(0, min(most, self.first_device + by))

    def devices(self) -> list[Text]:
        heights, columns = self.heights(), device_columns(self.width, len(self._devices))
        lines = self._device_lines(heights.each, columns)
        available, start = max(0, heights.devices - 1), self.first_device * heights.each
        seen = lines[start : start + available]
        title = Text("GPUs", "bold")
        if len(lines) > available:
            last = (start + len(seen)) // heights.each
            title = Text.assemble(title, f" {self.first_device + 1}-{last} of {len(lines) // heights.each}  [ ]")
        return [header_view.rule(title, memory_bar.legend(self.glyphs), self.width, self.glyphs), *seen]

    def _device_lines(self, each: int, columns: int) -> list[Text]:
        if not self._devices:
            text = self.machine.get("error") or ("No GPU found." if self.machine else "")
            return [Text(clean(text))]
        width = device_view.column_width(self.width, columns)
        frame = device_view.fit(self._devices, width, each, self.glyphs, self._now())
        lines = []
        for device in self._devices:
            label = device_view.label_of(device, self._devices)
            lines += device_view.device_lines(device, label, self._past(device["id"]), frame)
        return device_view.beside(lines, columns, each, width)

    def queue(self) -> list[Text]:
        counts = queue_view.counts_text(self.counts, self.glyphs)
        title = Text.assemble(("Queue", "bold"), "  ", counts)
        if self.search:
            title.append(f"  only '{clean(self.search)}'", "yellow")
        right = Text(queue_view.span_text(self.page, self.window))
        lines = [header_view.rule(title, right, self.width, self.glyphs)]
        if not self.page.rows and not self.page.total:
            return [*lines, *map(Text, self._nothing())]
        lines += queue_view.queue_lines(self.page, self.window, self.width, self.glyphs)
        return lines[: max(1, self.heights().queue)]

    def _nothing(self) -> list[str]:
        if self.trouble or not self.status:
            return []
        if self.search:
            return [f"  no job matches '{clean(self.search)}'; Esc shows all"]
        return ["  The queue is empty. Submit a job: gpuyard submit -- python train.py"]

    def log_lines(self) -> list[Text]:
        available = self.heights().log - 1
        title = self.log_title()
        right = Text("l: full log" if title.cell_len + 24 < self.width else "")
        lines = [header_view.rule(title, right, self.width, self.glyphs)]
        if self.log_note and not len(self.log):
            return [*lines, Text(cut(clean(self.log_note), self.width, self.glyphs.ellipsis), "dim")]
        return [*lines, *self.log.lines(max(0, len(self.log) - available), available)]

    def log_title(self) -> Text:
        row = self.chosen
        if row is None:
            return Text("Log", "bold")
        why = f"{row['state']}: {row['reason']}" if row["reason"] else row["state"]
        return Text.assemble(("Log", "bold"), clean(f"  job {queue_view.job_title(row)}  {self.glyphs.dot} {why}"))

    def notices(self) -> list[Text]:
        return [header_view.notice_line(self.notice, self.status.get("notices") or (), self.width, self.glyphs)]

    def keys(self) -> list[Text]:
        return [header_view.keys_line(self.width)]

    # Helpers

    @property
    def _devices(self) -> list[Answer]:
        return list(self.machine.get("devices") or ())

    def _past(self, device_id: str) -> DevicePast:
        return self._pasts.setdefault(device_id, DevicePast(use=SparklineSeries(), power=SparklineSeries()))

    def _now(self) -> float:
        """Return the daemon's time, which its history uses."""
        taken_at = self.machine.get("taken_at")
        return datetime.fromisoformat(taken_at).timestamp() if taken_at else 0.0
