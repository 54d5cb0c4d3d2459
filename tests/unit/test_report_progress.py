"""`gpuyard.progress` as a program calls it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpuyard
from gpuyard import report_progress
from gpuyard.output.progress_line import VARIABLE, read_progress_line


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "7.1.progress"
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setattr(report_progress, "_last_write", float("-inf"))
    monkeypatch.setattr(report_progress, "_unwritten", None)
    return path


def test_it_writes_a_line_that_the_daemon_reads(file: Path) -> None:
    gpuyard.progress(120, 4000, unit="step", left=60, loss=0.12, **{"val acc=": 1e-9})
    assert file.read_text() == "120/4000 unit=step left=60 loss=0.12 val_acc_=1e-09\n"
    assert read_progress_line(file.read_text()) is not None
    assert os.listdir(file.parent) == [file.name]


def test_nothing_happens_outside_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    gpuyard.progress(1, 2)
    assert os.listdir(tmp_path) == []


def test_calls_in_quick_succession_are_not_all_written(file: Path) -> None:
    for number in range(1000):
        gpuyard.progress(number)
    assert file.read_text() == "0\n"


def test_the_last_call_is_written_when_the_program_ends(file: Path) -> None:
    program = "import gpuyard\nfor n in range(1000): gpuyard.progress(n, 1000, loss=n)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert file.read_text() == "999/1000 loss=999\n"


def test_several_processes_leave_a_whole_line(file: Path) -> None:
    program = "import gpuyard\nfor n in range(50): gpuyard.report_progress._last_write = -9; gpuyard.progress(n, 50)"
    program = program.replace("import gpuyard\n", "import gpuyard, gpuyard.report_progress\n")
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert file.read_text() == "49/50\n"
    assert os.listdir(file.parent) == [file.name]


def test_a_file_that_cannot_be_replaced_is_written_in_place(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    file.write_text("an older and much longer line\n")
    monkeypatch.setattr(os, "replace", busy)
    gpuyard.progress(1, 2)
    assert file.read_text() == "1/2\n"
    assert os.listdir(file.parent) == [file.name]


def test_a_folder_that_is_gone_is_ignored(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(file.parent / "gone" / "x"))
    gpuyard.progress(1, 2)


def test_a_value_that_is_no_number_is_an_error(file: Path) -> None:
    with pytest.raises(ValueError, match="high"):
        gpuyard.progress(1, 2, loss="high")  # type: ignore[arg-type]


def test_it_imports_nothing_slow() -> None:
    program = "import gpuyard, sys; gpuyard.progress(1); print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(gpuyard.__file__).parents[1])}
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert not {"msgspec", "typing", "json"} & set(done.stdout.split())
