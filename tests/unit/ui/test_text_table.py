"""Tables and jobs as plain text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.ui.cli.jobs.job_text import devices_text, memory_text, result_text, where_text
from gpuyard.ui.cli.text_table import Column, cell_width, clean, cut, join_cells, lay_out

COLUMNS = (
    Column("ID", is_right=True), Column("COMMAND", is_long=True), Column("VRAM", is_right=True, is_spare=True),
    Column("PRIO", is_right=True, is_spare=True), Column("WHY", is_long=True),
)  # fmt: skip
ROW = ["7", "python train.py --lr 3e-4", "8 GB", "0", "GPU 0 is held by alice, pid 1234 (nightly)"]


def lines(rows: list[list[str]], width: int | None) -> list[str]:
    return [join_cells(cells) for cells in lay_out(COLUMNS, rows, width)]


def test_columns_line_up_and_optional_ones_are_dropped_last_first() -> None:
    heading, first, second = lines([ROW, ["1234", "true", "alone", "-5", ""]], None)
    assert heading.index("COMMAND") == first.index("python") == second.index("true")
    assert first.startswith("   7  ")
    assert second.startswith("1234  ")
    assert not second.endswith(" ")
    assert [cell.strip() for cell in lay_out(COLUMNS, [ROW], 45)[0]] == ["ID", "COMMAND", "VRAM", "WHY"]
    assert [cell.strip() for cell in lay_out(COLUMNS, [ROW], 36)[0]] == ["ID", "COMMAND", "WHY"]


def test_only_long_columns_are_cut_to_fit_the_width_the_longer_first() -> None:
    line = lines([ROW], 60)[1]
    assert len(line) <= 60
    assert "8 GB" in line
    assert line.count("…") == 2
    line = lines([["1", "short", "-", "0", "z" * 100]], 60)[1]
    assert "short" in line
    assert cell_width(line) == 60
    line = lines([["1", "x" * 500, "-", "0", "y" * 500]], None)[1]
    assert line.endswith("y" * 500)
    assert "x" * 59 + "…" in line


@given(
    rows=st.lists(st.lists(st.text(max_size=40), min_size=5, max_size=5), min_size=1, max_size=5),
    width=st.integers(min_value=60, max_value=120),
)
def test_no_line_is_wider_than_the_given_width(rows: list[list[str]], width: int) -> None:
    short = [[row[0][:4], row[1], row[2][:6], row[3][:4], row[4]] for row in rows]
    assert all(cell_width(line) <= width for line in lines(short, width))
    assert len(lines(short, width)) == len(rows) + 1


def test_wide_characters_take_two_columns_and_control_characters_are_replaced() -> None:
    assert [cell_width(text) for text in ("abc", "数据", "é", "é")] == [3, 4, 1, 1]
    assert cut("数据数据", 5) == "数据…"
    assert cell_width(cut("数据数据", 4)) <= 4
    assert clean("a\x1b[31mb\nc\td\udcff") == "a?[31mb c d?"


@pytest.mark.parametrize(
    ("row", "gpus", "memory"),
    [
        ({"gpus": 2, "gpu_labels": ["0", "amd:3"], "attempt": 1, "reserved_mb": 8192}, "0,amd:3", "8 GB"),
        ({"gpus": 1, "gpu_labels": [None], "attempt": 1, "reserved_mb": None}, "?", "alone"),
        ({"gpus": 2, "gpu_labels": [], "waited_s": 5.0, "estimated_mb": None}, "x2", "alone"),
        ({"gpus": 1, "gpu_labels": [], "waited_s": 5.0, "estimated_mb": 5325}, "x1", "5.2 GB"),
        ({"gpus": 1, "gpu_labels": ["0"], "attempt": 1, "waited_s": 5.0, "estimated_mb": 512}, "0", "512 MB"),
        ({"gpus": 1, "gpu_labels": [], "vram_mb": 1024}, "x1", "1 GB"),
        ({"gpus": 0, "gpu_labels": []}, "-", "-"),
    ],
)
def test_gpus_and_memory_of_a_job(row: dict[str, object], gpus: str, memory: str) -> None:
    known = {"attempt": 0, "waited_s": None, "vram_mb": None, "estimated_mb": None, **row}
    assert (devices_text(known), memory_text(known)) == (gpus, memory)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"gpus": 2, "gpu_labels": ["0", "amd:3"], "devices": ["GPU-a", "GPU-b"]}, "on GPU 0, amd:3"),
        ({"gpus": 1, "gpu_labels": [None], "devices": ["GPU-a"]}, "on GPU-a"),
        ({"gpus": 1, "gpu_labels": ["0"], "devices": ["GPU-a"], "waited_s": 3.0}, "needs 1 GPU"),
        ({"gpus": 2, "gpu_labels": [], "devices": []}, "needs 2 GPUs"),
        ({"gpus": 0, "gpu_labels": [], "devices": []}, None),
    ],
)
def test_where_a_job_runs_is_a_phrase(row: dict[str, object], text: str | None) -> None:
    assert where_text({"waited_s": None, **row}) == text


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"state": "queued", "status": None, "outcome": None, "ended_at": None, "reason": "no free GPU"},
            "no free GPU",
        ),
        ({"state": "queued", "status": 1, "outcome": "failed", "ended_at": None, "reason": None}, ""),
        ({"state": "failed", "status": 3, "outcome": "failed", "ended_at": "t", "reason": None}, "exit status 3"),
        ({"state": "failed", "status": 137, "outcome": "timed-out", "ended_at": "t", "reason": "after 2h"}, "after 2h"),
        ({"state": "failed", "status": None, "outcome": "lost", "ended_at": "t", "reason": None}, "lost"),
    ],
)
def test_result_or_reason_of_a_job(row: dict[str, object], text: str) -> None:
    assert result_text(row) == text
