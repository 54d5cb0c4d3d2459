"""Sweeps in `gpuyard top`: one row with progress, whose runs have a column for each value that varies."""

from gpuyard.ui.cli.jobs.job_text import row_ids
from gpuyard.ui.tui.job_actions import count_for
from gpuyard.ui.tui.queue_view import ids_text, job_title
from tests.unit.ui.test_top_view import a_row, a_screen, an_answer, plain

SWEEP = a_row(
    18, "running", name="tune", array=18, values={}, varies=("lr", "seed"), command="train {lr} {seed}",
    group={
        "ids": "18-57", "first": 18, "count": 40, "text": "12/40 done, 2 failed, 4 running",
        "counts": {"succeeded": 10, "failed": 2, "running": 4, "queued": 24},
    },
)  # fmt: skip


def run_of_sweep(job_id: int, lr: str, seed: str) -> dict[str, object]:
    return a_row(job_id, name="tune", array=18, values={"lr": lr, "seed": seed}, varies=("lr", "seed"), group=None)


def test_a_sweep_is_one_row_with_its_progress_and_all_its_ids() -> None:
    screen = a_screen(width=110)
    target, _ = screen.jobs_wanted()
    assert "fold=1" in target
    screen.hear_jobs(an_answer(SWEEP, a_row(58)), 0)
    text = plain(screen.queue())
    assert "12/40 done, 2 failed, 4 running" in text
    assert (row_ids(SWEEP), row_ids(a_row(58)), job_title(SWEEP)) == ("18-57", 58, "18-57 tune")


def test_the_runs_of_a_sweep_have_their_values_as_columns_or_in_their_names() -> None:
    screen = a_screen(width=110)
    screen.sweep = SWEEP
    target, _ = screen.jobs_wanted()
    assert "ids=18-57" in target
    assert "fold" not in target
    screen.hear_jobs(an_answer(run_of_sweep(18, "1e-3", "0"), run_of_sweep(19, "1e-2", "12")), 0)
    title, heading, first, second = [line.plain.split() for line in screen.queue()][:4]
    assert "18-57" in title
    assert heading[:5] == ["ID", "lr", "seed", "STATE", "JOB"]
    assert first[1:4] == ["18", "1e-3", "0"]
    assert second[:3] == ["19", "1e-2", "12"]
    assert "lr=" not in plain(screen.queue())
    screen = a_screen()
    screen.sweep, screen.only_failed = SWEEP, True
    assert "ids=18-57&state=failed,rejected" in screen.jobs_wanted()[0]
    assert screen.is_filtered
    screen = a_screen(width=110)
    screen.hear_jobs(an_answer(run_of_sweep(18, "1e-3", "0"), a_row(58, values={}, varies=())), 0)
    assert "tune lr=1e-3 seed=0" in plain(screen.queue())


def test_a_marked_sweep_counts_as_its_runs_and_keys_apply_to_some_of_them() -> None:
    screen = a_screen(width=300)
    screen.hear_jobs(an_answer(SWEEP, a_row(58)), 0)
    screen.marked = {row_ids(SWEEP): SWEEP}
    title, _, first, second = screen.queue()
    assert "40 marked" in title.plain
    assert ("*" in first.plain[:3], "*" in second.plain[:3]) == (True, False)
    assert all(word in plain(screen.keys()) for word in ("cancel", "hold", "suspend", "retry"))
    assert (count_for("hold", screen.targets), count_for("retry", screen.targets)) == (24, 12)
    assert "release" not in plain(screen.keys())
    screen.sweep = SWEEP  # its first run has the id of the row, and is not what was marked
    screen.hear_jobs(an_answer(run_of_sweep(18, "1e-3", "0")), 0)
    assert screen.marked == {}
    assert "*" not in screen.queue()[2].plain[:3]
    assert ids_text(["18-57", 60, 61]) == "18-57 60-61"
