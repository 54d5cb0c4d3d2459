"""Sweeps in `gpuyard top`: one row with progress, whose runs have a column for each value that varies."""

from gpuyard.ui.tui.queue_view import ids_of, job_title
from tests.unit.ui.test_top_view import a_row, a_screen, an_answer, plain

SWEEP = a_row(
    18, "running", name="tune", array=18, values={}, varies=("lr", "seed"), command="train {lr} {seed}",
    group={"ids": "18-57", "text": "12/40 done, 2 failed, 4 running"},
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
    assert (ids_of(SWEEP), ids_of(a_row(58)), job_title(SWEEP)) == ("18-57", 58, "18-57 tune")


def test_the_runs_of_an_open_sweep_have_a_column_for_each_value() -> None:
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


def test_runs_beside_other_jobs_have_their_values_in_their_names() -> None:
    screen = a_screen(width=110)
    screen.hear_jobs(an_answer(run_of_sweep(18, "1e-3", "0"), a_row(58, values={}, varies=())), 0)
    assert "tune lr=1e-3 seed=0" in plain(screen.queue())
