"""The screen of `gpuyard top` as a function of the daemon's answers: bars, histories, rows, logs, layout."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from gpuyard.ui.cli.jobs.job_text import STATES
from gpuyard.ui.cli.text_table import spell
from gpuyard.ui.tui import job_actions as header_view
from gpuyard.ui.tui.device_view import COLUMN_S, SparklineSeries, draw, figures, memory_of, split
from gpuyard.ui.tui.job_actions import ActionNotice, describe_result
from gpuyard.ui.tui.queue_view import Page, RowWindow, choose, move, page_of, settle, wanted
from gpuyard.ui.tui.screen_state import ScreenState, share_out
from gpuyard.ui.tui.terminal_text import LogText, has_colour, has_unicode
from gpuyard.ui.views import sparkline

SIZES = st.lists(st.one_of(st.just(0.0), st.floats(0.001, 200_000)), min_size=1, max_size=6)
NOW = "2026-11-16T02:00:00.000Z"
NOW_S = 1_794_794_400.0


def a_row(job_id: int, state: str = "queued", **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": job_id, "name": None, "state": state, "tag": None, "priority": 0, "user": "ann", "command": "python t.py",
        "gpus": 1, "vram_mb": 4096.0, "reserved_mb": None, "estimated_mb": 4096.0, "gpu_labels": [], "attempt": 0,
        "ended_at": None, "elapsed_s": None, "waited_s": 65.0, "status": None, "outcome": None, "reason": None,
        "index": None, "place": None,
    }  # fmt: skip
    return {**row, **more}


def a_device(index: int, **more: Any) -> dict[str, Any]:
    memory = {"capacity_mb": 24576, "own_mb": 12288, "own_used_mb": 9216, "others_mb": 2048, "others_used_mb": 1024,
              "foreign_mb": 3072, "free_mb": 7168}  # fmt: skip
    device = {
        "id": f"GPU-{index}", "index": index, "label": str(index), "vendor": "nvidia", "name": "NVIDIA H200",
        "parent": None,
        "memory_total_mb": 24576.0, "memory_used_mb": 13312.0, "utilization_percent": 45.0, "power_draw_w": 350.0,
        "power_limit_w": 700.0, "temperature_c": 61.0, "fault": None, "healthy": True, "memory": memory,
    }  # fmt: skip
    return {**device, **more}


def an_answer(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"jobs": list(rows), "counts": {"queued": len(rows)}, "next": None, "total": len(rows), **more}


def a_screen(devices: int = 2, width: int = 80, height: int = 24) -> ScreenState:
    screen = ScreenState()
    screen.status, screen.trouble = {"paused": False, "notices": []}, None
    screen.hear_devices({"taken_at": NOW, "host": {"name": "box"}, "devices": [a_device(at) for at in range(devices)]})
    screen.resize(width, height)
    return screen


def plain(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


@given(SIZES, st.integers(0, 200))
def test_a_bar_fills_its_width_and_shows_every_part(parts: list[float], width: int) -> None:
    widths = split(parts, width)
    present = sum(part > 0 for part in parts)
    assert sum(widths) == (width if present else 0)
    assert all((count > 0) <= (part > 0) for count, part in zip(widths, parts, strict=True))
    assert sum(map(bool, widths)) == min(present, width)


def test_parts_of_a_bar_are_proportional_and_differ_without_colour() -> None:
    assert split([6, 3, 0, 1], 20) == [12, 6, 0, 2]
    assert split([1000, 1], 10) == [9, 1]
    memory = memory_of(a_device(0))
    assert memory == {"own": 9216, "kept": 3072, "others": 2048, "foreign": 3072, "free": 7168}
    assert spell(draw(memory, 24).plain, "ascii") == "#########===++xxx......."
    assert set(draw(memory, 24).plain) == set("█▄▒×·")  # noqa: RUF001
    assert memory_of({"id": "x", "memory": {"capacity_mb": None}}) is None
    memory = {"own": 10240.0, "free": 2048.0}
    assert figures(memory, 30).plain == "own 10  free 2 GB"
    assert figures(memory, 15).plain == "█10 ·2 GB"


def test_a_history_has_a_block_per_interval_and_gaps_for_unknown_values() -> None:
    series = SparklineSeries()
    for at, value in ((0.0, 100.0), (1.0, 0.0), (2 * COLUMN_S, 50.0), (2 * COLUMN_S + 1, None)):
        series.note(at, value)
    assert series.last(4, 2 * COLUMN_S + 2) == [None, 100.0, None, 50.0]
    assert sparkline(series.last(4, 2 * COLUMN_S), 100.0) == " █ ▅"
    series = SparklineSeries()
    series.note(10 * COLUMN_S, 7.0)
    for at, value in ((8 * COLUMN_S, 1.0), (9 * COLUMN_S, None), (10 * COLUMN_S, 3.0)):
        series.note(at, value)
    assert series.last(3, 10 * COLUMN_S) == [1.0, None, 7.0]


def test_a_long_queue_is_requested_in_a_few_rows_around_the_visible_part() -> None:
    window = RowWindow(height=8)
    page = page_of({"jobs": [a_row(n) for n in range(24)], "next": 24, "total": 100_000}, 0)
    after, limit = wanted(window, (0, 0))
    assert (after, limit) == (0, 24)
    assert wanted(move(window, 10, page), (after, limit)) == (after, limit), "the rows are loaded already"
    far = move(window, 10**9, page)
    assert (far.at, far.top) == (99_999, 99_992)
    after, limit = wanted(far, (after, limit))
    assert after <= far.top
    assert far.top + far.height <= after + limit <= after + 24


def test_a_selected_job_stays_selected_when_it_moves() -> None:
    page = Page(rows=tuple(map(a_row, (1, 2, 3))), total=3)
    window = choose(RowWindow(height=2), 1, page)
    moved = settle(window, Page(rows=tuple(map(a_row, (3, 1, 2))), total=3))
    assert (moved.job_id, moved.at, moved.top) == (2, 2, 1)
    gone = settle(moved, Page(rows=tuple(map(a_row, (3, 1))), total=2))
    assert (gone.job_id, gone.at) == (1, 1)


def test_by_default_the_first_job_is_selected_if_any() -> None:
    window = settle(RowWindow(height=5), Page(rows=tuple(map(a_row, (1, 2))), total=2))
    assert window.job_id == 1
    assert settle(window, Page(rows=tuple(map(a_row, (2, 1))), total=2)).job_id == 2
    window = settle(RowWindow(height=5), Page())
    assert (window.job_id, window.top, move(window, 1, Page()).at) == (None, 0, 0)


@given(st.integers(1, 200), st.integers(0, 64))
def test_panels_share_the_height_and_the_queue_always_gets_some(height: int, devices: int) -> None:
    heights = share_out(height, devices)
    assert heights.devices + heights.queue + heights.log == max(0, height - 3)
    assert heights.queue >= min(4, height - 3)


def test_at_80x24_two_gpus_have_two_lines_each_and_eight_have_one() -> None:
    two, eight = share_out(24, 2), share_out(24, 8)
    assert (two.each, two.devices) == (2, 5)
    assert (eight.each, eight.devices) == (1, 9)
    assert two.log >= 5
    assert eight.queue >= 7
    assert eight.log >= 4


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 60), (20, 5), (132, 43)])
@pytest.mark.parametrize("devices", [0, 1, 2, 8, 16])
def test_no_panel_exceeds_the_terminal_width_or_its_height(width: int, height: int, devices: int) -> None:
    screen = a_screen(devices, width, height)
    rows = [a_row(n, state, reason="GPU 0: 4 GB are free, 10 GB needed") for n, state in enumerate(STATES)]
    screen.hear_jobs(an_answer(*rows), 0)
    screen.log.feed("a line\n" * 50)
    heights = screen.heights()
    for lines, most in (
        (screen.devices(), heights.devices), (screen.queue(), heights.queue), (screen.head(), 1), (screen.keys(), 1),
    ):  # fmt: skip
        assert len(lines) <= max(1, most)
        assert max(line.cell_len for line in lines) <= max(width, 48)
    shown = plain([*screen.devices(), *screen.queue(), *screen.keys()])
    assert spell(shown, "ascii").isascii()
    assert spell(shown, "ascii").count("?") == shown.count("?"), "each sign has its own in ASCII"


def test_a_device_is_shown_with_its_bar_figures_history_and_fault() -> None:
    screen = a_screen()
    screen.hear_history({"devices": {"GPU-0": {"at": [NOW_S - 5], "utilization_percent": [100.0], "power_w": [700.0]}}})
    heading, first, second, *_ = (spell(line.plain, "ascii") for line in screen.devices())
    assert "# own  = reserved  + others  x foreign  . free" in heading
    assert first.startswith("0 NVIDIA H200 ####")
    assert first.endswith("13/24 GB  45%         #=")
    assert "own 9  reserved 3  others 2  foreign 3  free 7 GB" in second
    assert second.endswith("61 C 350/700 W         #+")
    screen = a_screen(0)
    screen.hear_devices({"taken_at": NOW, "devices": [a_device(0, healthy=False, fault="fell off the bus")]})
    assert "unhealthy: fell off the bus" in plain(screen.devices())


def test_devices_that_do_not_fit_are_scrolled_and_stand_side_by_side_on_a_wide_terminal() -> None:
    screen = a_screen(16)
    assert "1-8 of 16" in screen.devices()[0].plain
    assert screen.devices()[-1].plain.startswith(" 7 ")
    screen.scroll_devices(100)
    assert screen.devices()[-1].plain.startswith("15 ")
    lines = a_screen(8, width=200, height=24).devices()
    assert lines[1].plain.startswith("0 NVIDIA H200")
    assert "4 NVIDIA H200" in lines[1].plain


def test_a_row_shows_its_state_and_reason() -> None:
    screen = a_screen(width=120)
    held_up = a_row(17, name="train", index=3, priority=5, reason="every GPU is taken", tag="night")
    screen.hear_jobs(
        an_answer(held_up, a_row(18, "running", gpu_labels=["1"], attempt=1, elapsed_s=5.0, user="bob")), 0
    )
    heading, columns, first, second = screen.queue()
    assert columns.plain.split() == ["ID", "STATE", "JOB", "USER", "GPU", "VRAM", "PRIO", "TIME", "WHY"]
    assert first.plain.startswith("▶  17 ○ queued     train[3]")
    assert first.plain.rstrip().endswith("every GPU is taken")
    assert "1m 5s" in first.plain
    assert "running" in second.plain
    assert "2 queued" in heading.plain


def test_names_and_reasons_cannot_contain_terminal_control_sequences() -> None:
    screen = a_screen()
    screen.hear_jobs(an_answer(a_row(1, name="a\x1b[2Jb", reason="c\x07d\n")), 0)
    assert plain([*screen.queue(), *screen.log_lines()]).replace("\n", "").isprintable()


def test_an_empty_queue_shows_how_to_submit_and_a_search_what_is_missing() -> None:
    screen = a_screen()
    screen.hear_jobs(an_answer(), 0)
    assert "gpuyard submit" in plain(screen.queue())
    screen.search = "x"
    assert "no job matches 'x'" in plain(screen.queue())
    screen = a_screen()
    screen.search, screen.finished = "lr=1 &", "none"
    target, after = screen.jobs_wanted()
    assert target.startswith("/jobs?limit=")
    assert "search=lr%3D1%20%26" in target
    assert "state=running," in target
    assert " " not in target
    assert after == 0


def test_the_header_shows_why_no_job_starts_and_the_last_line_its_keys() -> None:
    assert "paused" in header_view.head_line({}, {"paused": True}, None, 80).plain
    assert "draining" in header_view.head_line({}, {"paused": True, "draining": True}, None, 80).plain
    assert "reconnecting" in header_view.head_line({}, {"paused": True}, "reconnecting: no daemon runs", 80).plain
    assert header_view.keys_line(20).plain == "? help  q quit"
    assert header_view.keys_line(300).plain.startswith("Enter show")
    text = plain(header_view.help_lines())
    for key in (key for keys, _ in header_view.KEYS for key in ([*keys] if keys == "+-" else [keys])):
        assert key in text


def test_an_action_is_reported_with_its_result_before_notices_of_the_daemon() -> None:
    assert describe_result("hold", {"count": 1, "changed": "17", "unchanged": []}) == ActionNotice("held 17")
    refused = describe_result("hold", {"count": 0, "changed": "", "unchanged": [{"id": 17, "reason": "it runs"}]})
    assert refused == ActionNotice("17 is not held: it runs", is_bad=True)
    assert describe_result("hold", {"count": 0, "changed": "", "unchanged": []}).is_bad
    some = describe_result("hold", {"count": 2, "changed": "17-18", "unchanged": [{"id": 19, "reason": "it runs"}]})
    assert some == ActionNotice("held 17-18; 1 unchanged: it runs")
    screen = a_screen()
    screen.status = {"notices": ["the disk is full"]}
    assert plain(screen.notices()) == "! the disk is full"
    screen.notice = ActionNotice("held 17")
    assert plain(screen.notices()) == "held 17"


def test_a_log_keeps_colours_and_no_other_control_sequences_or_links() -> None:
    log = LogText()
    log.feed("\x1b[31mred\x1b[0m plain\x1b[2J\x07\x1b]0;title\x07\n")
    (line,) = log[:5]
    assert line.plain == "red plain"
    assert next((span.start, span.end, str(span.style)) for span in line.spans) == (0, 3, "color(1)")
    log.feed("a\x9b2Jb\n\x1b[32mab\x1b[0m\tc")
    assert plain(log[1:3]) == "a?2Jb\nab      c"
    log = LogText()
    log.feed("\x1b]8;;http://x\x1b\\here\x1b]8;;\x1b\\")
    (line,) = log[:1]
    assert line.plain == "here"
    assert not line.spans


def test_only_the_last_content_of_a_line_and_the_end_of_a_log_are_kept() -> None:
    log = LogText()
    for part in ("10%\r", "20%\r", "30", "%\r\nnext"):
        log.feed(part)
    assert plain(log[:9]) == "30%\nnext"
    log = LogText()
    log.feed("".join(f"{number}\n" for number in range(20_000)))
    assert len(log) < 20_000
    assert log[-1:][0].plain == "19999"


def test_standard_error_that_is_told_apart_has_lines_of_its_own_in_another_colour() -> None:
    log = LogText()
    log.feed("out\nloss")
    log.feed(" 30%\r", is_stderr=True)
    log.feed(" 1.5\n")
    log.feed(" 40%", is_stderr=True)
    assert plain(log[:9]) == "out\nloss 1.5\n 40%"
    assert [bool(line.spans) for line in log[:9]] == [False, False, True]
    log.separate("--- attempt 2 ---")
    assert plain(log[2:9]) == " 40%\n\n--- attempt 2 ---"


def test_a_long_line_of_a_page_is_wrapped_and_indented() -> None:
    lines = header_view.wrap([Text("  reason: " + "word " * 20)], 40)
    assert len(lines) > 2
    assert all(line.cell_len <= 40 for line in lines)
    assert lines[1].plain.startswith("    word")
    assert " ".join(plain(lines).split()) == ("reason: " + "word " * 20).strip()


@pytest.mark.parametrize("text", ["x" * 100_000, "word " * 20_000, "漢字" * 20_000, "e\u0301" * 20_000])
def test_a_command_of_any_length_is_wrapped_completely(text: str) -> None:
    lines = header_view.wrap([Text(f"command: {text}")], 80)
    assert max(line.cell_len for line in lines) <= 80
    assert "".join(line.plain for line in lines).replace(" ", "") == f"command:{text}".replace(" ", "")


@pytest.mark.parametrize(
    ("environment", "is_unicode"),
    [
        ({"TERM": "xterm-256color", "LANG": "en_US.UTF-8"}, True), ({"TERM": "screen", "LANG": "C.utf8"}, True),
        ({"TERM": "xterm"}, True), ({"TERM": "xterm", "LANG": "C"}, False),
        ({"TERM": "xterm", "LANG": "C", "LC_CTYPE": "C.UTF-8"}, False),
        ({"TERM": "xterm", "LC_ALL": "POSIX", "LANG": "en_US.UTF-8"}, False),
        ({"TERM": "xterm", "LANG": "de_DE.ISO-8859-1"}, False), ({"TERM": "linux", "LANG": "en_US.UTF-8"}, False),
        ({"TERM": "vt100", "LANG": "en_US.UTF-8"}, False),
    ],
)  # fmt: skip
def test_a_terminal_gets_only_supported_characters(environment: dict[str, str], is_unicode: bool) -> None:
    assert has_unicode(environment, "utf-8") == is_unicode
    assert not has_unicode(environment, "latin-1")


def test_colour_and_characters_are_used_only_if_supported() -> None:
    assert has_colour({"TERM": "xterm"})
    assert not has_colour({"TERM": "xterm", "NO_COLOR": ""})
    assert not has_colour({"TERM": "vt220"})
    assert spell("größe █", "ascii") == "gr??e #"
    assert spell("größe █", "utf-8") == "größe █"
