"""`gpuyard.torch` where there is no PyTorch, and outside a job."""

import subprocess
import sys

import pytest

import gpuyard
from gpuyard.errors import UserError
from gpuyard.system.parking_protocol import own_attempt


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


def test_importing_gpuyard_imports_no_torch() -> None:
    program = "import gpuyard, sys; gpuyard.torch.parkable; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


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


def test_fewer_than_one_process_is_refused() -> None:
    with pytest.raises(UserError, match="world_size is 0"):
        gpuyard.torch.parkable(object(), world_size=0)
