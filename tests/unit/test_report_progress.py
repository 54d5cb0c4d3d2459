"""`gpuyard.progress` as a program calls it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpuyard
from gpuyard import report_progress
from gpuyard.errors import UserError
from gpuyard.output.progress_line import VARIABLE, read_progress_line
from gpuyard.system.parking_protocol import own_attempt


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "7.1.progress"
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setattr(report_progress, "_last_write", float("-inf"))
    monkeypatch.setattr(report_progress, "_unwritten", None)
    return path


def test_a_line_is_written_for_the_daemon(file: Path) -> None:
    gpuyard.progress(120, 4000, unit="step", left=60, loss=0.12, **{"val acc=": 1e-9})
    assert file.read_text() == "120/4000 unit=step left=60 loss=0.12 val_acc_=1e-09\n"
    assert read_progress_line(file.read_text()) is not None
    assert os.listdir(file.parent) == [file.name], "it writes a line that the daemon reads"
    for number in range(1000):
        gpuyard.progress(number)
    assert file.read_text().startswith("120/4000 "), "calls in quick succession are not all written"


def test_programs_go_on_without_a_file_or_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    gpuyard.progress(1, 2)
    assert os.listdir(tmp_path) == [], "nothing happens outside a job"
    # A folder that is gone is ignored.
    monkeypatch.setenv(VARIABLE, str(file.parent / "gone" / "x"))
    gpuyard.progress(1, 2)


def test_the_last_line_stays_whole(file: Path) -> None:
    program = "import gpuyard\nfor n in range(1000): gpuyard.progress(n, 1000, loss=n)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert file.read_text() == "999/1000 loss=999\n", "the last call is written when the program ends"
    program = "import gpuyard\nfor n in range(50): gpuyard.report_progress._last_write = -9; gpuyard.progress(n, 50)"
    program = program.replace("import gpuyard\n", "import gpuyard, gpuyard.report_progress\n")
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert file.read_text() == "49/50\n"
    assert os.listdir(file.parent) == [file.name], "several processes leave a whole line"


def test_a_file_that_cannot_be_replaced_is_written_in_place(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    file.write_text("an older and much longer line\n")
    monkeypatch.setattr(os, "replace", busy)
    gpuyard.progress(1, 2)
    assert file.read_text() == "1/2\n"
    assert os.listdir(file.parent) == [file.name]


def test_a_value_that_is_no_number_is_an_error(file: Path) -> None:
    with pytest.raises(ValueError, match="high"):
        gpuyard.progress(1, 2, loss="high")  # type: ignore[arg-type]


def test_it_imports_nothing_slow() -> None:
    program = "import gpuyard, sys; gpuyard.progress(1); print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(gpuyard.__file__).parents[1])}
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert not {"msgspec", "typing", "json"} & set(done.stdout.split())


class Optimizer:
    """Calls its hooks after each step, as PyTorch's optimisers do."""

    def __init__(self) -> None:
        self.hooks: list[object] = []

    def register_step_post_hook(self, hook: object) -> None:
        self.hooks.append(hook)

    def step(self) -> None:
        for hook in self.hooks:
            assert callable(hook)
            hook(self, (), {})


def test_outside_a_job_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPUYARD_QUEUE", "GPUYARD_JOB_ID", "GPUYARD_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)
    optimizer = Optimizer()
    parking = gpuyard.torch.parkable(object(), optimizer)
    optimizer.step()
    parking.point()
    assert len(optimizer.hooks) == 1


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"GPUYARD_QUEUE": "/q", "GPUYARD_JOB_ID": "17"},
        {"GPUYARD_QUEUE": "relative", "GPUYARD_JOB_ID": "17", "GPUYARD_ATTEMPT": "1"},
        {"GPUYARD_QUEUE": "/q", "GPUYARD_JOB_ID": "../17", "GPUYARD_ATTEMPT": "1"},
    ],
)
def test_a_process_without_the_variables_of_a_job_has_no_socket(environment: dict[str, str]) -> None:
    assert own_attempt(environment) is None


def test_a_process_of_a_job_knows_its_queue_and_attempt() -> None:
    environment = {"GPUYARD_QUEUE": "/q", "GPUYARD_JOB_ID": "17", "GPUYARD_ATTEMPT": "2"}
    assert own_attempt(environment) == ("/q", "17.2")
    # Fewer than one process is refused.
    with pytest.raises(UserError, match="world_size is 0"):
        gpuyard.torch.parkable(object(), world_size=0)
    # Importing gpuyard imports no torch.
    program = "import gpuyard, sys; gpuyard.torch.parkable; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
