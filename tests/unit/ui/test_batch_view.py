"""The progress and the summary of a batch, as text and as a live display."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.recipes.batch.finish import Summary, UnmovedRun, UnsuccessfulRun
from gpuyard.recipes.batch.plan import BatchPlan
from gpuyard.ui.cli.text_table import cut_line
from gpuyard.ui.views import Frame
from gpuyard.ui.views.batch_view import Progress, TimeLeft, hold_of, line_of, picture_of, progress_of, summary_lines
from gpuyard.ui.views.live_display import PlainDisplay

PROGRESS = Progress(
    name="city", total=400, succeeded=140, failed=2, cancelled=0, running=6, gate="gpu",
    held_by="GPU 91% > 80% on GPU 0", elapsed_s=725.0, left_s=1320.0,
)  # fmt: skip
PLAN = BatchPlan(name="city", command=("./make",), count=400, root="/data/out", pruned_root="/data/empty")
SUMMARY = Summary(
    name="city", command=("./make",), root="/data/out", runs=400, succeeded=400, failed=0, cancelled=0, pruned=31,
    attempts=400, frames=47520, waits_s={"stagger": 0.4, "cpu": 61.0, "gpu": 1330.0}, unknown=(), started_at=None,
    ended_at=None, seconds=4321.0, failures=(), left=(),
)  # fmt: skip


def drawn(progress: Progress, width: int = 80) -> str:
    lines = picture_of(progress, Frame(width=width))
    return "\n".join("".join(text for text, _ in cut_line(line, width)) for line in lines)


def failure(index: int, state: str = "failed") -> UnsuccessfulRun:
    log = f"/logs/{index}.log"
    return UnsuccessfulRun(index=index, seed=7 + index, id=18 + index, state=state, reason="exit status 3", log=log)


def test_the_display_and_a_line_show_the_progress_and_the_gate_that_holds_the_next_run() -> None:
    head, counts, hold = drawn(PROGRESS).splitlines()
    assert head.startswith("city ")
    assert head.endswith("142 of 400 done")
    assert counts.split("   ") == ["6 running", "252 waiting", "2 failed", "12m 5s, about 22m left"]
    assert hold == "limited by GPU 91% > 80% on GPU 0"
    assert line_of(PROGRESS) == (
        "gpuyard: 142 of 400 done, 6 running, 252 waiting, 2 failed; limited by GPU 91% > 80% on GPU 0; "
        "12m 5s, about 22m left"
    )


def test_the_bar_grows_with_finished_runs_and_fits_into_a_narrow_terminal() -> None:
    def length(finished: int) -> int:
        lines = drawn(replace(PROGRESS, total=20, succeeded=finished, failed=0, running=0), width=60).splitlines()
        return lines[0].count("█")

    assert length(0) == 0
    assert abs(length(20) - 2 * length(10)) <= 2 < length(10)
    lines = drawn(replace(PROGRESS, name="a-very-long-name-of-a-program"), width=40).splitlines()
    assert [len(line) <= 40 for line in lines] == [True] * 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"gate": "concurrency", "held_by": "6 runs"}, "at the limit of --concurrency"),
        ({"gate": "stagger", "held_by": "runs start 2 s apart"}, "runs start 2 s apart"),
        ({"gate": "room", "held_by": "1 GB free, 2 GB needed"}, "waits for a GPU: 1 GB free, 2 GB needed"),
        ({"gate": None, "held_by": None}, "the next run is about to start"),
        ({"succeeded": 392}, "the last runs are running"),
        ({"succeeded": 398, "running": 0, "gate": None}, "all runs have finished; summing up"),
        ({"succeeded": 398, "running": 0, "gate": "pause", "held_by": "the queue is paused"}, "the queue is paused"),
        ({"held_by": "GPU \x1b[2J"}, "limited by GPU ?[2J"),
    ],
)
def test_the_reason_of_the_next_run_is_shown(change: dict[str, Any], expected: str) -> None:
    assert hold_of(replace(PROGRESS, **change)) == expected


def test_the_progress_is_counted_from_the_answer_of_the_queue() -> None:
    counts = {"succeeded": 5, "failed": 1, "rejected": 1, "cancelled": 2, "running": 3, "stopping": 1, "delayed": 1}
    answer = {
        "count": 20, "counts": {**counts, "queued": 6}, "gate": "gpu", "held_by": "GPU 91% > 80%", "device": "SIM-1",
        "device_label": "1", "now": "2026-01-02T03:05:05.000Z",
    }  # fmt: skip
    found = progress_of("city", answer, 60.0)
    assert (found.finished, found.running, found.waiting, found.failed, found.elapsed_s) == (9, 4, 7, 2, 60.0)
    assert hold_of(found) == "limited by GPU 91% > 80% on GPU 1"


def test_the_time_left_follows_recent_runs_once_as_many_have_finished_as_run_at_once() -> None:
    outlook = TimeLeft()
    outlook.note(0.0, 10, 4)
    for now, finished in ((10.0, 11), (11.0, 12), (12.0, 13)):
        outlook.note(now, finished, 4)
        assert outlook.left_s(now, 8) is None
    outlook.note(16.0, 14, 4)
    assert outlook.left_s(16.0, 8) == pytest.approx(8 * 16 / 4)
    outlook = TimeLeft()
    for done in range(101):  # one per second
        outlook.note(float(done), done, 2)
    for done in range(101, 141):  # then one every ten seconds
        outlook.note(100.0 + 10 * (done - 100), done, 2)
    assert outlook.left_s(500.0, 10) == pytest.approx(100.0, rel=0.1)
    soon, later = outlook.left_s(500.0, 10), outlook.left_s(600.0, 10)
    assert soon is not None
    assert later is not None
    assert later > soon + 20


def test_a_pipe_gets_a_line_when_something_has_changed_and_not_too_often(capfd: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    screen = PlainDisplay(0.0, 5.0, lambda: now)
    shown = [(0.0, 1), (1.0, 2), (4.9, 3), (5.0, 3), (60.0, 3), (61.0, 4)]
    for now, done in shown:
        progress = replace(PROGRESS, succeeded=done, held_by=f"GPU {now}%")
        screen.show(lambda _: [], line_of(progress), progress.changes)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["3", "5", "6"]  # two have failed


def test_a_summary_contains_the_results_and_the_waits_longest_first() -> None:
    first, *others = summary_lines(SUMMARY, PLAN)
    assert first == "city: all 400 runs succeeded, in 1h 12m"
    assert [line.strip() for line in others] == [
        "", "frames  47,520", "pruned  31 runs without a frame, in /data/empty",
        "waited  22m 10s for a GPU to be less busy (--max-gpu)", "1m 1s for the CPU to be less busy (--max-cpu)",
        "files   /data/out",
    ]  # fmt: skip


def test_a_summary_names_failed_and_unmoved_runs_and_limits_that_were_not_enforced() -> None:
    failures = (*(failure(index) for index in range(25)), *(failure(index, "cancelled") for index in range(30, 40)))
    bad = replace(SUMMARY, succeeded=365, failed=25, cancelled=10, attempts=420, failures=failures)
    text = "\n".join(summary_lines(bad, replace(PLAN, pruned_root=None)))
    assert text.startswith("city: 365 of 400 runs succeeded, 25 failed, 10 cancelled, in 1h 12m\n")
    assert "failed    run 0, seed 7: exit status 3  /logs/0.log\n" in text
    assert text.count("exit status 3") == 20
    assert "and 5 more: see summary.json" in text
    assert "attempts  420\n" in text
    assert "pruned" not in text
    left = (UnmovedRun(run="run-000003", why="No space left on device"),)
    text = "\n".join(summary_lines(replace(SUMMARY, left=left, unknown=("--max-gpu",)), PLAN))
    assert "not pruned  run-000003: No space left on device\n" in text
    assert "unchecked   --max-gpu: no probe measures it\n" in text
