"""The table of a workspace in terminals of all sizes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.recipes.workspace.sweep_status import ConfigStatus, SweepStatus
from gpuyard.ui.cli.text_table import cell_width, spell
from gpuyard.ui.views import Frame
from gpuyard.ui.views.workspace_table import changes_of, describe_logs, picture_of, summary_of

STATES = (
    "completed", "running", "suspended", "finishing", "stopping", "waiting", "retrying", "held", "failed", "stopped",
    "not started", "no marker",
)  # fmt: skip


def row(config: str, state: str, **others: Any) -> ConfigStatus:
    return ConfigStatus(config=config, state=state, **others)


def running(config: str, gpu: str = "0", **others: Any) -> ConfigStatus:
    session = f"TASK_{config}_gpu{gpu}"
    facts = {"seconds": 75.0, "memory_mb": 812.0, "attempt": 1, "job": 7, "last_line": "epoch 3 of 9, loss 0.123"}
    return row(config, "running", gpu=gpu, session=session, **{**facts, **others})


ROWS = (
    row("exp1", "completed", gpu="0", seconds=733.0, memory_mb=8123.0, attempt=1, job=1, last_line="saved"),
    running("exp2"),
    running("exp3", "1", attempt=2),
    row("exp4", "failed", gpu="1", seconds=3.0, attempt=1, job=4, log="/tmp/train_logs/exp4.log", note="exit status 3"),
    row("exp5", "waiting", job=5, note="no free GPU"),
)
STATUS = SweepStatus(
    workspace="/home/alice/my_experiment", task_name="TASK", tag="my_experiment-1a2b3c", rows=ROWS, left_s=7260.0,
    why="exp5 waits: GPU 0 has 3 GB free, 8 GB needed",
)  # fmt: skip


def drawn(status: SweepStatus, columns: int | None = None, lines: int | None = None, **others: bool) -> list[str]:
    picture = picture_of(status, Frame(width=columns, height=lines, **others))
    return ["".join(text for text, _ in line) for line in picture]


def cells(lines: list[str], config: str) -> list[str]:
    line = next(line for line in lines if line.startswith(config))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def styles(status: SweepStatus, text: str) -> set[str | None]:
    picture = picture_of(status, Frame(width=100))
    return {style for line in picture for part, style in line if text in part}


def test_a_row_shows_the_figures_of_a_task_and_the_lines_below_where_to_look() -> None:
    lines = drawn(STATUS, 120)
    assert lines[0] == "TASK  /home/alice/my_experiment"
    assert cells(lines, "CONFIG") == ["CONFIG", "STATE", "GPU", "TIME", "MEMORY", "TRY", "SESSION", "LAST LINE"]
    assert cells(lines, "exp1") == ["exp1", "✓ completed", "0", "12m 13s", "7.9 GB", "1", "-", "saved"]
    assert cells(lines, "exp3") == [
        "exp3", "● running", "1", "1m 15s", "812 MB", "2", "TASK_exp3_gpu1", "epoch 3 of 9, loss 0.123",
    ]  # fmt: skip
    assert cells(lines, "exp5") == ["exp5", "○ waiting", "-", "-", "-", "-", "-", "no free GPU"]
    assert lines[-5:] == [
        "1 of 5 done · 2 running · 1 waiting · 1 failed · about 2h 1m left",
        "exp5 waits: GPU 0 has 3 GB free, 8 GB needed", "exp4 failed; log: /tmp/train_logs/exp4.log",
        "to watch a task: tmux attach -t TASK_exp2_gpu0", "logs: /tmp/train_logs/CONFIG.log",
    ]  # fmt: skip
    assert not any("waits" in line for line in drawn(replace(STATUS, rows=ROWS[:3]), 120))


def test_completed_tasks_without_a_marker_are_counted_and_start_is_named() -> None:
    rows = (*ROWS[:1], *(row(f"m{number}", "no marker") for number in range(5)))
    lines = drawn(replace(STATUS, rows=rows, left_s=0.0, why=None), 120)
    assert cells(lines, "m0")[1] == "? no marker"
    assert lines[-2:] == [
        "1 of 6 done · 5 without marker",
        "completed, but without a marker, so `start` runs again: m0, m1, m2 and 2 more",
    ]


def test_logs_in_one_place_are_one_line_and_the_others_are_named() -> None:
    logs = [(f"exp{number}", f"/tmp/train_logs/exp{number}.log") for number in range(5)]
    others = [("a", "/tmp/train_logs/w-123456_a.log"), ("b", "/h/logs/17.1.log"), ("c", "/h/logs/18.1.log")]
    assert list(describe_logs([*others, *logs])) == [
        "logs: /tmp/train_logs/CONFIG.log",
        "logs of b, c: /h/logs; `gpuyard logs JOB` prints one",
        "logs of a: /tmp/train_logs/w-123456_CONFIG.log",
    ]


def test_the_bar_shows_completed_failed_and_running_tasks_proportionally() -> None:
    bar = next(line for line in drawn(STATUS, 200) if "%" in line)
    blocks, percent = bar.split()
    assert percent == "20%"
    assert [blocks.count(block) for block in "█✗▒░"] == [12, 12, 24, 12]
    full = replace(STATUS, rows=(ROWS[0],), left_s=0.0, why=None)
    assert next(line for line in drawn(full, 40) if "%" in line) == f"{'█' * 34}  100%"


@pytest.mark.parametrize(
    ("rows", "left_s", "expected"),
    [
        (ROWS[1:2], None, "0 of 1 done · 1 running · time left unknown until a task finishes"),
        (ROWS[:2], None, "1 of 2 done · 1 running · time left unknown"),
        (ROWS[:2], 45.0, "1 of 2 done · 1 running · about 45s left"),
        (ROWS[:1], 0.0, "1 of 1 done"),
        ((row("a", "stopped"), row("b", "not started")), 0.0, "0 of 2 done · 1 stopped · 1 not started"),
    ],
)
def test_the_time_left_is_shown_if_known(rows: tuple[ConfigStatus, ...], left_s: float | None, expected: str) -> None:
    assert summary_of(replace(STATUS, rows=rows, left_s=left_s)) == expected


def test_the_last_line_is_shown_after_a_note_without_control_sequences() -> None:
    written = "\x1b[1;32mepoch 3\x1b[0m \x1b]0;my title\x07of 9\x1b[K\x07"
    lines = drawn(replace(STATUS, rows=(running("exp1", last_line=written),)), 120)
    assert cells(lines, "exp1")[-1] == "epoch 3 of 9?"
    flagged = replace(ROWS[0], note="completed, though it ended with status 3")
    lines = drawn(replace(STATUS, rows=(flagged,)), 160)
    assert cells(lines, "exp1")[-1] == "completed, though it ended with status 3 · saved"


def test_with_few_columns_the_session_is_left_out_and_a_name_keeps_its_end() -> None:
    rows = tuple(running(f"resnet50_lr1e-3_seed{number}") for number in range(3))
    lines = drawn(replace(STATUS, rows=rows), 80)
    assert cells(lines, "CONFIG") == ["CONFIG", "STATE", "GPU", "TIME", "MEMORY", "TRY", "LAST LINE"]
    assert cells(lines, "resnet50_lr1e-3_seed2")[-1].startswith("epoch 3 of")
    assert "tmux attach -t TASK_resnet50_lr1e-3_seed0_gpu0" in lines[-1]
    rows = tuple(running(f"resnet50_imagenet_lr1e-3_warmup_seed{number}") for number in range(3))
    shown = [line.split()[0] for line in drawn(replace(STATUS, rows=rows), 40) if line.startswith("resnet")]
    assert len(set(shown)) == 3
    assert [name[-5:] for name in shown] == ["seed0", "seed1", "seed2"]


def test_with_few_lines_active_tasks_are_shown_and_the_rest_is_counted() -> None:
    done = [row(f"a{number:02}", "completed") for number in range(40)]
    waiting = [row(f"m{number:02}", "waiting") for number in range(20)]
    broken = row("n", "failed")
    status = replace(STATUS, rows=(*done, *waiting, broken, running("z")), why=None)
    lines = drawn(status, 80, 24)
    assert len(lines) < 24
    names = [line.split()[0] for line in lines[2 : lines.index("") - 1]]
    assert names == [*(f"m{number:02}" for number in range(len(names) - 2)), "n", "z"]
    assert f"and {20 - len(names) + 2} waiting, 40 completed" in lines
    assert "40 of 62 done · 1 running · 20 waiting · 1 failed · about 2h 1m left" in lines


def test_a_path_longer_than_the_window_is_wrapped_and_never_cut() -> None:
    log = f"/home/{'a' * 90}/two  spaces/exp4.log"
    lines = drawn(replace(STATUS, rows=(replace(ROWS[3], log=log),), why=None), 40)
    assert log.replace(" ", "") in "".join(lines[-8:]).replace(" ", "")


def test_a_workspace_without_a_config_or_a_stopped_one_is_reported() -> None:
    empty = replace(STATUS, rows=(), why=None)
    assert drawn(empty, 80) == ["TASK  /home/alice/my_experiment", "No configs yet: put YAML files into configs/."]
    stopped = replace(STATUS, is_stopped=True)
    assert any("no new ones start. `start` continues" in line for line in drawn(stopped, 120))
    done = replace(stopped, rows=ROWS[:1], why=None)
    assert not any("Stopped" in line for line in drawn(done, 120))


def test_states_are_coloured_by_urgency() -> None:
    assert styles(STATUS, "● running") == {"green"}
    assert styles(STATUS, "✗ failed") == {"red"}
    assert styles(STATUS, "✓ completed") == {"dim"}
    assert styles(STATUS, "1 failed") == {"red"}
    assert styles(STATUS, "exp5 ") == {None}


def test_a_terminal_without_unicode_gets_ascii_only_and_a_pipe_no_symbols() -> None:
    text = spell("\n".join(drawn(STATUS, 80)), "ascii")
    assert text.isascii()
    assert "1 of 5 done . 2 running . 1 waiting . 1 failed . about 2h 1m left" in text
    assert "#" * 12 + "x" * 12 + "+" * 24 + "." * 12 in text
    rows = (running("exp2", last_line="x" * 300),)
    lines = drawn(replace(STATUS, rows=rows), has_symbols=False)
    assert cells(lines, "exp2")[1] == "running"
    assert cells(lines, "exp2")[-1] == "x" * 300


def test_a_change_is_reported_with_its_device_and_attempt() -> None:
    then = replace(STATUS, rows=tuple(row(f"exp{number}", "waiting") for number in range(1, 6)))
    assert changes_of(then, STATUS) == [
        "exp1 completed", "exp2 running on GPU 0", "exp3 running on GPU 1, attempt 2", "exp4 failed",
    ]  # fmt: skip
    assert changes_of(STATUS, replace(STATUS, left_s=1.0)) == []


texts = st.text(max_size=30) | st.sampled_from(
    ["実験 七", "\x1b[2J\x1b]0;x\x07", "a\nb\tc", "-rf $(reboot)", "e\u0301" * 20]
)
known_rows = st.builds(
    ConfigStatus, config=texts, state=st.sampled_from(STATES), gpu=st.none() | st.sampled_from(["0", "0,1,2,3"]),
    seconds=st.none() | st.floats(0, 1e7), memory_mb=st.none() | st.floats(0, 1e6), attempt=st.integers(0, 1000),
    session=st.none() | texts, log=st.none() | texts, last_line=st.none() | texts, note=st.none() | texts,
)  # fmt: skip
standings = st.builds(
    SweepStatus, workspace=texts, task_name=texts, tag=st.just("tag"),
    rows=st.lists(known_rows, max_size=30).map(tuple), is_stopped=st.booleans(),
    left_s=st.none() | st.floats(0, 1e7), why=st.none() | texts,
)  # fmt: skip


@given(standings, st.integers(40, 200), st.none() | st.integers(1, 60))
def test_a_table_fits_and_has_no_control_sequences(status: SweepStatus, columns: int, lines: int | None) -> None:
    shown = drawn(status, columns, lines)
    assert all(line.isprintable() for line in shown)
    assert max(map(cell_width, shown)) <= columns
    assert sum(line.startswith("CONFIG") for line in shown) == (1 if status.rows else 0)
