"""The progress and the summary of a render, as text and as a live display."""

import pytest

from gpuyard.recipes.render.manifest import ManifestMistake
from gpuyard.recipes.render.status_file import RenderReport, RenderStatus, Skip
from gpuyard.ui.cli.text_table import cut_line
from gpuyard.ui.views import Frame
from gpuyard.ui.views.live_display import PlainDisplay
from gpuyard.ui.views.render_view import RenderRate, RenderScreen, line_of, picture_of, summary_lines
from tests.unit.recipes.render.example_status import STATUS, status, worker


def drawn(now: RenderStatus, pace: float | None = None, width: int = 80) -> list[str]:
    lines = picture_of(now, pace, Frame(width=width))
    return ["".join(text for text, _ in cut_line(line, width)) for line in lines]


LEFT = "left: VRAM 11 GB, RAM 45 GB"


def test_the_display_shows_the_progress_the_memory_and_what_workers_wait_for() -> None:
    head, counts, memory, assets, references, waits = drawn(STATUS, 1.66)
    assert head.rstrip().endswith("1,303 of 2,000 labels")
    assert counts.split("   ") == ["100 existed", "3 skipped", "1.7 labels/s", "12m 5s, about 22m left"]
    assert "VRAM" in memory
    assert "33 GB of 44 GB" in memory
    assert "45 GB of 90 GB" in memory
    assert assets == "2 of 5 scene slots in use, 1 actor in VRAM, 90% of requests found in VRAM"
    assert references == f"{LEFT}; in use: a.ply by 2 workers and 3 units to come, wa…"
    assert waits == "no worker is waiting"
    workers = (worker("waiting", "disk"), worker("rendering"), worker("waiting", "disk"), worker("waiting", "slot"))
    assert drawn(status(workers=workers))[-1] == "3 of 4 workers waiting: 2 for the disk, 1 for a scene slot"


def test_bars_grow_with_their_figures_and_fit_into_a_narrow_terminal() -> None:
    def length(rendered: int) -> int:
        return drawn(status(labels=20, rendered=rendered, already=0, skipped=0), width=60)[0].count("█")

    assert length(0) == 0
    assert abs(length(20) - 2 * length(10)) <= 2 < length(10)
    assert all(len(line) <= 44 for line in drawn(STATUS, 1.0, width=44))


@pytest.mark.parametrize("width", [24, 40, 60])
def test_a_narrow_terminal_has_a_line_for_each_memory_with_its_name_and_all_figures(width: int) -> None:
    vram, ram = (line for line in drawn(STATUS, 1.0, width=width) if " of " in line and "GB" in line)
    assert (vram.split()[0], vram.rstrip().endswith("33 GB of 44 GB")) == ("VRAM", True)
    assert (ram.split()[0], ram.rstrip().endswith("45 GB of 90 GB")) == ("RAM", True)
    assert vram.count("█") >= ram.count("█")
    assert {"█", "░"} & set(ram)


def test_without_a_terminal_a_line_shows_the_same_and_nothing_unknown() -> None:
    assert line_of(status(workers=(worker("waiting", "ram"),)), 0.05) == (
        "gpuyard: 1,303 of 2,000 labels, 100 existed, 3 skipped, 3.0 labels/min, 12m 5s, about 22m left; "
        "VRAM 33 GB of 44 GB, RAM 45 GB of 90 GB; "
        "2 of 5 scene slots in use, 1 actor in VRAM, 90% of requests found in VRAM; "
        f"{LEFT}; in use: a.ply by 2 workers and 3 units to come, walk by 1 worker; "
        "1 of 1 worker waiting: 1 for free RAM"
    )
    first = status(labels=10, rendered=0, already=0, skipped=0, left_s=None, elapsed_s=0.2)
    assert line_of(first, None).startswith("gpuyard: 0 of 10 labels, 0s; ")


def test_the_rate_is_that_of_recent_labels() -> None:
    pace = RenderRate()
    rates = [
        pace.note(status(elapsed_s=float(at), rendered=rendered)) for at, rendered in [(0, 0), (10, 100), (20, 200)]
    ]
    assert rates == [None, 10.0, 10.0]
    for at in range(30, 120, 10):
        last = pace.note(status(elapsed_s=float(at), rendered=200 + (at - 20)))
    assert last == 1.0


def test_a_pipe_gets_a_line_from_time_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with PlainDisplay(10.0, 10.0, lambda: now[0]) as display:
        screen = RenderScreen(display)
        for second in range(25):
            now[0] = float(second)
            screen.show(status(elapsed_s=float(second)))
        screen.note("gpuyard: stopping")
    lines = capsys.readouterr().err.splitlines()
    assert [", 10s" in lines[0], ", 20s" in lines[1], lines[2]] == [True, True, "gpuyard: stopping"]
    assert len(lines) == 3


def summed_up(report: RenderReport, *bad: ManifestMistake) -> list[str]:
    return list(summary_lines(report, bad, "/out"))


def test_the_summary_shows_what_was_rendered_and_the_time_and_bytes_it_took() -> None:
    done = status(state="finished", rendered=1900, skipped=0, stalls_s={"disk": 61.0, "slot": 0.2, "vram": 700.0})
    assert summed_up(RenderReport(status=done, skipped=())) == [
        "1,900 of 2,000 labels rendered, 100 existed already, in 12m 5s", "",
        "  moved   60 GB read, 80 GB uploaded, 1 GB brought back to RAM",
        "  assets  90 found in VRAM, 6 in RAM, 4 on disk", "  peak    VRAM 43 GB of 44 GB, RAM 89 GB of 90 GB",
        "  waited  11m 40s for free VRAM (--vram-budget)", "          1m 1s for the disk", "  files   /out",
    ]  # fmt: skip


def test_the_summary_names_the_first_few_skipped_labels_of_each_kind() -> None:
    skipped = [Skip(label=f"l{number}", kind="asset", reason="/b.ply: it is empty") for number in range(7)]
    skipped.append(Skip(label="x", kind="renderer", reason="ValueError: bad\nvalue"))
    lines = summed_up(RenderReport(status=status(skipped=8, rendered=1892), skipped=tuple(skipped)))
    assert lines[2:10] == [
        "  skipped  7: a scene or an actor cannot be read", "             l0: /b.ply: it is empty",
        *(f"             l{number}: /b.ply: it is empty" for number in range(1, 5)),
        "             and 2 more: see /out/skipped.jsonl", "  skipped  1: the renderer failed",
    ]  # fmt: skip
    assert lines[10] == "             x: ValueError: bad value"


def test_the_summary_shows_what_is_left_and_which_entries_were_left_out() -> None:
    stopped = status(state="interrupted", rendered=1000, already=0, skipped=0)
    lines = summed_up(
        RenderReport(status=stopped, skipped=()), ManifestMistake(place="line 3", reason="it is not JSON")
    )
    assert lines[0] == "1,000 of 2,000 labels rendered, 1,000 left, in 12m 5s"
    assert lines[2] == "  manifest  1 error; entries with errors were left out"
