"""Rows of `gpuyard top` that can be told apart, marked jobs, and the keys that apply to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.ui.cli.text_table import cell_width, cut_middle
from gpuyard.ui.tui.job_actions import describe_refusal, name_rows
from gpuyard.ui.tui.queue_view import arguments_text
from tests.unit.ui.test_top_view import a_row, a_screen, an_answer, plain


def test_arguments_are_shown_after_the_name_if_reasons_leave_room() -> None:
    screen = a_screen(width=120)
    rows = [a_row(at, name="sweep", index=at, command=f"python -u train.py --lr {at}e-3") for at in (1, 2)]
    screen.hear_jobs(an_answer(*rows), 0)
    assert "sweep[1] --lr 1e-3" in screen.queue()[2].plain
    assert "sweep[2] --lr 2e-3" in screen.queue()[3].plain
    screen.resize(80, 24)
    screen.hear_jobs(an_answer(*({**row, "reason": "no GPU available now: " + "x" * 60} for row in rows)), 0)
    assert "sweep[1]" in screen.queue()[2].plain
    assert "--lr 1e-3" not in screen.queue()[2].plain
    assert "no GPU available" in screen.queue()[2].plain


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("python train.py --lr 0.1", "--lr 0.1"), ("/usr/bin/python3.12 -u -m pkg.train --lr 0.1", "--lr 0.1"),
        ("./train --lr 0.1", "--lr 0.1"), ("sh -c 'a && b'", "-c 'a && b'"), ("true", ""), ("python -V", ""),
    ],
)  # fmt: skip
def test_arguments_are_what_follows_the_program_and_its_script(command: str, arguments: str) -> None:
    assert arguments_text(command) == arguments


def test_a_long_name_keeps_its_end() -> None:
    name = "vit-large-imagenet21k-warmup-cosine-schedule-seed{}"
    screen = a_screen()
    screen.hear_jobs(an_answer(*(a_row(at, name=name.format(at), reason="no GPU " * 9) for at in (3, 4))), 0)
    assert "seed3" in screen.queue()[2].plain
    assert "seed4" in screen.queue()[3].plain


@given(st.text(max_size=60), st.integers(1, 60))
def test_a_text_that_is_cut_in_its_middle_fits(text: str, width: int) -> None:
    assert cell_width(cut_middle(text, width)) <= width


def test_a_marked_job_has_a_star_and_is_counted_until_it_leaves_the_list() -> None:
    screen = a_screen()
    screen.hear_jobs(an_answer(a_row(1), a_row(2)), 0)
    screen.marked = {2: a_row(2)}
    heading, _, first, second = screen.queue()
    assert "1 marked" in heading.plain
    assert first.plain.startswith("▶ ")
    assert second.plain.startswith(" *")
    assert [row["id"] for row in screen.targets] == [2]
    screen.hear_jobs(an_answer(a_row(1), a_row(2, "running")), 0)
    assert screen.targets[0]["state"] == "running"
    screen = a_screen()
    screen.hear_jobs(an_answer(a_row(1), a_row(2)), 0)
    screen.marked = {1: a_row(1), 2: a_row(2)}
    screen.hear_jobs(an_answer(a_row(2), total=60, next=30), 30)
    assert list(screen.marked) == [1, 2]  # this part of the list does not say where job 1 is
    screen.hear_jobs(an_answer(a_row(2)), 0)
    assert list(screen.marked) == [2]


@pytest.mark.parametrize(
    ("width", "marked", "named"),
    [
        (58, 1, "job 12 train.py"),
        (58, 2, "12 train.py and 13 eval.py"),
        (58, 3, "12 train.py, 13 eval.py and 18-57 lear…g-rate (39 jobs)"),
        (58, 9, "12 train.py, 13 eval.py and 45 more"),
        (70, 9, "12 train.py, 13 eval.py, 18-57 learning-rate (39 jobs) and 6 more"),
        (40, 9, "12 train.py, 13 eval.py and 45 more"),
        (20, 9, "12 t… and 46 more"),
    ],
)
def test_a_question_names_the_jobs_as_far_as_they_fit(width: int, marked: int, named: str) -> None:
    group = {"ids": "18-57", "first": 18, "count": 40, "counts": {"queued": 39, "succeeded": 1}}
    long = (a_row(at, name=f"vit-large-imagenet21k-{at}") for at in range(60, 66))
    rows = [a_row(12, name="train.py"), a_row(13, name="eval.py"), a_row(18, name="learning-rate", group=group), *long]
    assert name_rows("cancel", rows[:marked], width) == named


@given(st.lists(st.text(max_size=60), min_size=1, max_size=8), st.integers(40, 200))
def test_a_question_is_no_wider_than_its_line(names: list[str], width: int) -> None:
    rows = [a_row(at, name=name or None, command=name) for at, name in enumerate(names, 1)]
    assert cell_width(name_rows("cancel", rows, width)) <= width


def test_only_keys_that_apply_to_the_selected_or_marked_jobs_are_shown() -> None:
    screen = a_screen(width=300)
    screen.hear_jobs(an_answer(a_row(1, "failed"), a_row(2, "held")), 0)
    keys = plain(screen.keys())
    assert "t retry" in keys
    assert not any(word in keys for word in ("cancel", "hold", "release", "suspend", "resume", "priority"))
    screen.marked = {2: a_row(2, "held")}
    keys = plain(screen.keys())
    assert all(word in keys for word in ("cancel", "release", "priority"))
    assert "retry" not in keys


def test_failed_only_is_part_of_the_request() -> None:
    screen = a_screen()
    screen.only_failed, screen.search = True, "vit"
    assert "search=vit&state=failed,rejected" in screen.jobs_wanted()[0]
    screen.hear_jobs(an_answer(), 0)
    screen.search = ""
    assert "No job failed; Esc shows all" in plain(screen.queue())


def test_an_action_that_does_not_apply_is_refused_with_the_state() -> None:
    running = a_row(17, "running")
    assert describe_refusal("hold", [running]).text == "hold does not apply to job 17, which is running"
    assert describe_refusal("hold", [running, running]).text == "hold applies to none of the 2 marked jobs"
