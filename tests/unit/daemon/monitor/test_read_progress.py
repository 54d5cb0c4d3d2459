"""Reading logs and progress files of attempts, with bounds."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuyard.daemon.monitor.job_progress_watch import FIRST_BYTES, NEXT_BYTES, AttemptProgress, ProgressSource
from gpuyard.engines.common.spawn_program import headline
from gpuyard.model.job_progress import ProgressReading


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "7.1.log"


@pytest.fixture
def source(log: Path, tmp_path: Path) -> ProgressSource:
    return ProgressSource(job_id=7, number=1, logs=(str(log),), files=(str(tmp_path / "7.1.progress"),))


def done(reading: ProgressReading | None) -> float | None:
    return None if reading is None or reading.amount is None else reading.amount.done


def test_new_output_is_read_once(log: Path, source: ProgressSource) -> None:
    attempt = AttemptProgress()
    assert attempt.read(source) is None
    log.write_text("epoch 1/10 loss=3\n")
    assert done(attempt.read(source)) == 1
    assert attempt.read(source) is None
    with log.open("a") as file:
        file.write("epoch 2/10 loss=2\nepoch 3/10 loss=1\n")
    reading = attempt.read(source)
    assert reading is not None
    assert done(reading) == 3
    assert list(reading.figures) == [(("loss", 2.0),), (("loss", 1.0),)]


def test_an_epoch_is_known_long_after_its_heading(log: Path, source: ProgressSource) -> None:
    attempt = AttemptProgress()
    log.write_text("Epoch 3/10\n")
    attempt.read(source)
    for step in range(1, 6):
        with log.open("a") as file:
            file.write("x" * (2 * NEXT_BYTES) + f"\nstep {step}/10\n")
        assert done(attempt.read(source)) == pytest.approx(2 + step / 10)


def test_only_whole_lines_of_the_attempt_in_the_last_part_of_a_log_are_read(log: Path, source: ProgressSource) -> None:
    log.write_text("epoch 1/10\n" + "y" * FIRST_BYTES + "\n")
    assert AttemptProgress().read(source) is None
    log.write_text(f"epoch 9/10 loss=1\n{headline('7', '1')}started\nhello\n")
    assert AttemptProgress().read(source) is None
    log.write_text("x" * FIRST_BYTES + " loss=1 of the line that is cut apart\nloss=2\n")
    reading = AttemptProgress().read(source)
    assert reading is not None
    assert [dict(each) for each in reading.figures] == [{"loss": 2.0}]


def test_a_log_that_was_written_anew_is_read_anew(log: Path, source: ProgressSource) -> None:
    attempt = AttemptProgress()
    log.write_text("step 900/1000 and some more words\n")
    attempt.read(source)
    log.write_text("step 1/1000\n")
    assert done(attempt.read(source)) == 1


def test_the_last_line_of_an_attempt_that_is_over_counts_without_its_end(log: Path, source: ProgressSource) -> None:
    attempt = AttemptProgress()
    log.write_text("epoch 10/10 loss=0.5")
    first = attempt.read(source)
    assert first is not None
    assert not first.figures
    over = ProgressSource(job_id=7, number=1, logs=source.logs, files=source.files, is_over=True)
    last = attempt.read(over)
    assert last is not None
    assert list(last.figures) == [(("loss", 0.5),)]


def test_the_file_outweighs_the_log_and_goes_with_the_attempt(log: Path, source: ProgressSource) -> None:
    attempt, file = AttemptProgress(), Path(source.files[0])
    log.write_text("epoch 1/10\n")
    file.write_text("5/8\n")
    reading = attempt.read(source)
    assert done(reading) == 5
    assert reading is not None
    assert reading.is_told
    assert attempt.read(source) is None
    log.write_text("epoch 2/10\n")
    assert attempt.read(source) is None
    attempt.read(replace(source, is_over=True))
    assert file.exists(), "a daemon that dies now could read it again"
    assert attempt.read(replace(source, is_recorded=True)) is None
    assert not file.exists()


def test_a_pipe_in_place_of_a_file_is_not_waited_for(source: ProgressSource) -> None:
    os.mkfifo(source.files[0])
    os.mkfifo(source.logs[0])
    assert AttemptProgress().read(source) is None
