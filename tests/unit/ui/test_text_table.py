"""Tables, sizes and times as plain text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.units import format_duration, format_size
from gpuyard.ui.cli.text_table import (
    Column,
    cell_width,
    clean,
    cut,
    devices_text,
    duration_text,
    lay_out,
    line_of,
    memory_text,
    result_text,
    size_text,
)

COLUMNS = (
    Column("ID", is_right=True),
    Column("COMMAND", is_long=True),
    Column("VRAM", is_right=True, is_spare=True),
    Column("PRIO", is_right=True, is_spare=True),
    Column("WHY", is_long=True),
)
ROW = ["7", "python train.py --lr 3e-4", "8.0 GB", "0", "GPU 0 is held by alice, pid 1234 (nightly)"]


def lines(rows: list[list[str]], room: int | None) -> list[str]:
    return [line_of(cells) for cells in lay_out(COLUMNS, rows, room)]


def test_columns_line_up_and_numbers_stand_on_the_right() -> None:
    heading, first, second = lines([ROW, ["1234", "true", "alone", "-5", ""]], None)
    assert heading.index("COMMAND") == first.index("python") == second.index("true")
    assert first.startswith("   7  ")
    assert second.startswith("1234  ")
    assert not second.endswith(" ")


def test_a_pipe_gets_the_last_column_whole_and_no_column_pushes_the_others_away() -> None:
    line = lines([["1", "x" * 500, "-", "0", "y" * 500]], None)[1]
    assert line.endswith("y" * 500)
    assert "x" * 59 + "…" in line


def test_in_little_room_the_long_columns_are_cut_and_the_short_ones_are_whole() -> None:
    line = lines([ROW], 60)[1]
    assert len(line) <= 60
    assert "8.0 GB" in line
    assert line.count("…") == 2


def test_in_less_room_what_can_be_spared_goes_last_first() -> None:
    assert [cell.strip() for cell in lay_out(COLUMNS, [ROW], 45)[0]] == ["ID", "COMMAND", "VRAM", "WHY"]
    assert [cell.strip() for cell in lay_out(COLUMNS, [ROW], 36)[0]] == ["ID", "COMMAND", "WHY"]


def test_of_two_long_columns_the_shorter_is_whole_as_long_as_the_other_has_more() -> None:
    line = lines([["1", "short", "-", "0", "z" * 100]], 60)[1]
    assert "short" in line
    assert cell_width(line) == 60


@given(
    rows=st.lists(st.lists(st.text(max_size=40), min_size=5, max_size=5), min_size=1, max_size=5),
    room=st.integers(min_value=60, max_value=120),
)
def test_no_line_is_wider_than_the_room_it_has(rows: list[list[str]], room: int) -> None:
    short = [[row[0][:4], row[1], row[2][:6], row[3][:4], row[4]] for row in rows]
    assert all(cell_width(line) <= room for line in lines(short, room))
    assert len(lines(short, room)) == len(rows) + 1


def test_wide_letters_take_two_columns_and_combining_ones_none() -> None:
    assert [cell_width(text) for text in ("abc", "数据", "é", "é")] == [3, 4, 1, 1]
    assert cut("数据数据", 5) == "数据…"
    assert cell_width(cut("数据数据", 4)) <= 4


def test_what_a_terminal_would_obey_is_taken_out() -> None:
    assert clean("a\x1b[31mb\nc\td\udcff") == "a?[31mb c d?"


@given(st.floats(min_value=0, max_value=1e9))
def test_sizes_and_times_read_as_everywhere_else(number: float) -> None:
    assert size_text(number) == format_size(number)
    assert duration_text(number) == format_duration(number)


def test_unknown_is_a_dash() -> None:
    assert (size_text(None), duration_text(None)) == ("-", "-")


@pytest.mark.parametrize(
    ("row", "gpus", "memory"),
    [
        ({"gpus": 2, "gpu_indexes": [0, 3], "attempt": 1, "reserved_mb": 8192}, "0,3", "8.0 GB"),
        ({"gpus": 1, "gpu_indexes": [None], "attempt": 1, "reserved_mb": None}, "?", "alone"),
        ({"gpus": 2, "gpu_indexes": [], "waited_s": 5.0, "estimated_mb": None}, "x2", "alone"),
        ({"gpus": 1, "gpu_indexes": [], "waited_s": 5.0, "estimated_mb": 5325}, "x1", "5.2 GB"),
        ({"gpus": 1, "gpu_indexes": [0], "attempt": 1, "waited_s": 5.0, "estimated_mb": 512}, "0", "512 MB"),
        ({"gpus": 1, "gpu_indexes": [], "vram_mb": 1024}, "x1", "1.0 GB"),
        ({"gpus": 0, "gpu_indexes": []}, "-", "-"),
    ],
)
def test_what_a_job_has_or_wants_is_told_in_a_word(row: dict[str, object], gpus: str, memory: str) -> None:
    known = {"attempt": 0, "waited_s": None, "vram_mb": None, **row}
    assert (devices_text(known), memory_text(known)) == (gpus, memory)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"state": "queued", "status": None, "outcome": None, "ended_at": None, "reason": "no room"}, "no room"),
        ({"state": "queued", "status": 1, "outcome": "failed", "ended_at": None, "reason": None}, ""),
        ({"state": "failed", "status": 3, "outcome": "failed", "ended_at": "t", "reason": None}, "exit 3"),
        (
            {"state": "failed", "status": 137, "outcome": "timed-out", "ended_at": "t", "reason": "after 2h"},
            "after 2h",
        ),
        ({"state": "failed", "status": None, "outcome": "lost", "ended_at": "t", "reason": None}, "lost"),
    ],
)
def test_a_result_or_a_reason_is_told_in_a_few_words(row: dict[str, object], said: str) -> None:
    assert result_text(row) == said
