"""A report on a terminal and as an HTML page: its content, and that any name is shown as text."""

from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.report.chart_rows import HOUR_S, TimeWindow
from gpuyard.report.usage_report import PastAttempt, Reporter
from gpuyard.ui.cli.text_table import spell
from gpuyard.ui.views import Frame
from gpuyard.ui.views.report_html import report_page
from gpuyard.ui.views.report_text import group_cells, report_lines

UNTIL = datetime(2026, 11, 16, 12, tzinfo=UTC).timestamp()
DAYS = ("Mon  9", "Tue 10", "Wed 11", "Thu 12", "Fri 13", "Sat 14", "Sun 15", "Mon 16")
HOSTILE = "<script>alert('x')</script>\x1b[31m&\"[red]"


def answer(*attempts: PastAttempt, days: int = 7, devices: int = 2) -> dict[str, Any]:
    """As the daemon gives it."""
    window = TimeWindow(UNTIL - days * 24 * HOUR_S, UNTIL)
    cards = [Device(id=f"G{at}", vendor=Vendor.SIMULATED, index=at, memory_total_mb=1024.0) for at in range(devices)]
    reporter = Reporter(window, cards, lambda at: datetime.fromtimestamp(at, UTC))
    for each in attempts:
        reporter.add(each)
    shape = msgspec.to_builtins(reporter.report())
    since, until = (datetime.fromtimestamp(at, UTC).isoformat() for at in (window.since, window.until))
    return {**shape, "by": "user", "host": "box", "since": since, "until": until}


def ran(hours_ago: float, **fields: Any) -> PastAttempt:
    """Two hours on one card."""
    started_at = UNTIL - hours_ago * HOUR_S
    usual: dict[str, Any] = {"job": 1, "group": "ada", "started_at": started_at, "ended_at": started_at + 2 * HOUR_S,
                             "queued_at": started_at - 90, "devices": ("G0",), "gpus": 1, "is_alone": True,
                             "peaks_mb": {"G0": 256.0}, "outcome": "succeeded"}  # fmt: skip
    return PastAttempt(**{**usual, **fields})


def some() -> dict[str, Any]:
    return answer(
        ran(50),
        ran(40, job=2, outcome="out-of-memory", lacked="device", is_healed=True),
        ran(30, job=3, group="a name that is a good deal longer than its column is wide", outcome="failed", status=137),
        ran(20, job=4, devices=("G1",), peaks_mb={}, suspended=((UNTIL - 19 * HOUR_S, UNTIL - 18.5 * HOUR_S),)),
    )


def shown(report: dict[str, Any], columns: int = 80) -> str:
    lines = report_lines(report, Frame(width=columns))
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


class Page(HTMLParser):
    """The texts of a page, and its tags; whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("src", "href")]
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_figures_are_shown_with_their_labels() -> None:
    text = shown(some(), 120)
    assert "GPU-hours         7.5  2% of the time of 2 GPUs was in use" in text
    assert "4 attempts: 2 succeeded, 2 failed" in text
    assert "median; 9 of 10 jobs started within 1m 30s" in text
    assert "75%  of the memory reserved was never used: 4.5 of 6.0 GB-hours; not measured for 1.5 GPU-hours" in text
    assert "Out of memory       1  all of those jobs succeeded later" in text
    assert "Suspended      0.50 h" in text
    assert "exit status 137 (SIGKILL)         1" in text


def test_cancelled_and_preempted_attempts_are_no_failures() -> None:
    report = answer(
        ran(5), ran(6, outcome="cancelled"), ran(7, outcome="preempted"), ran(8, outcome="failed", status=1)
    )
    text = shown(report, 120)
    assert "4 attempts: 1 succeeded, 1 failed, 1 cancelled, 1 stopped to let others run" in text
    (group,) = report["groups"]
    assert group_cells(group)[-1] == "1"


def test_hours_with_gpus_in_use_are_drawn() -> None:
    report = some()
    rows = {line[:10]: line[12:60] for line in shown(report).splitlines() if line.endswith(("0", "5"))}
    assert rows["Sat 14 Nov"] == "· · · · · · · · · · ▅ ▅ · · · · · · · · ▅ ▅ · · "
    plain = spell(shown(report), "ascii")
    assert plain.isascii()
    assert "Sat 14 Nov  . . . . . . . . . . + + . ." in plain


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_the_report_fits_the_terminal_and_cuts_names_rather_than_figures(columns: int) -> None:
    lines = shown(some(), columns).splitlines()
    assert max(map(len, lines)) <= columns
    (cut,) = [line for line in lines if line.startswith("a name ")]
    assert "…" in cut.split("  ")[0]
    assert " 2.0 " in cut
    assert [line[:10] for line in lines if " Nov  " in line] == [f"{day} Nov" for day in DAYS]


def test_a_period_without_attempts_or_gpus_is_reported_in_a_sentence_and_long_ones_with_years() -> None:
    years = answer(ran(50), days=1000)
    assert "\n20 Feb 2024 ·" in shown(years)
    assert ">20 Feb 2024<" in report_page(years)
    assert "No job ran in this time." in shown(answer())
    assert "No job ran in this time." in report_page(answer())
    report = answer(ran(5, devices=(), gpus=0, peaks_mb={}), devices=0)
    assert "this machine has no GPU now" in shown(report)
    assert "BY THE HOUR" not in shown(report)
    assert "by the hour" not in report_page(report)


def test_any_name_is_shown_as_text() -> None:
    report = {**answer(ran(5, group=HOSTILE)), "host": HOSTILE}
    page = Page(report_page(report))
    assert "script" not in page.tags
    assert "<script>alert('x')</script>?[31m&\"[red]" in page.texts
    assert "<script>alert('x')</script>?[31m&\"[red]" in shown(report, 200)
    assert "\n[red]x " in shown(answer(ran(5, group="[red]x")))
    assert "\x1b" not in report_page(report) + shown(report, 200)


def test_a_page_has_the_figure_of_each_drawn_hour_and_loads_nothing_else() -> None:
    page = Page(report_page(some()))
    assert "Sat 14 Nov, 10:00: 50% of the GPUs in use" in page.texts
    assert "out of GPU memory" in page.texts
    assert "1 succeeded on a later attempt" in page.texts
    text = report_page(some())
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert "url(" not in text
    assert "http:" not in text
    assert "https:" not in text
    assert "prefers-color-scheme: dark" in text
