"""On a machine with an NVIDIA card, driver 570 or later, and PyTorch: a training that parks its memory has the same
result as one that is not disturbed."""

import shutil
import sys
from pathlib import Path

import pytest

from gpuyard.core.job.job import Attempt, OutcomeKind
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.probes.nvidia.nvml import Nvml
from gpuyard.system.park_sockets import registered
from tests.integration.engine_fixture import engine, folder, log_of, outcomes, wait_for
from tests.integration.suspend_fixture import nothing_is_left, resumed, script, suspended, suspender, wait_for_line

__all__ = ["engine", "folder", "nothing_is_left", "suspender"]

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")

# Trains a model with tied weights, a buffer and a scheduler, and prints a digest of all of its state. References to
# parameters and views that were taken before are used at the end.
TRAINING = """
import hashlib, sys, time
import torch
import gpuyard
torch.manual_seed(5)
torch.use_deterministic_algorithms(True)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8192, 8192, bias=False)
        self.second = torch.nn.Linear(8192, 8192, bias=False)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(8192)
    def forward(self, data):
        return self.second(torch.tanh(self.norm(self.first(data))))
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
extra = {"noise": [torch.randn(64, 1 << 20, device="cuda")]}
kept, view, pointer = model.first.weight, extra["noise"][0][3], id(model.first.weight)
parking = gpuyard.torch.parkable(model, optimizer, extra)
for step in range(int(sys.argv[1])):
    data = torch.randn(64, 8192, device="cuda")
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
    if step == 1:
        print("holding", flush=True)
    time.sleep(0.01)
assert id(model.first.weight) == pointer and model.second.weight is kept
digest = hashlib.sha256()
for each in [kept, view, *model.buffers(), *optimizer.state[kept].values()]:
    digest.update(each.detach().cpu().contiguous().numpy().tobytes())
print("digest", digest.hexdigest(), flush=True)
"""


@pytest.fixture(autouse=True)
def able() -> None:
    pytest.importorskip("torch")


def card_id() -> str:
    return Nvml().read(10).devices[0].id


def used_mb() -> float:
    return Nvml().read(10).devices[0].memory_used_mb or 0.0


def training(engine: LocalEngine, folder: Path, job_id: int) -> Attempt:
    # A program of the engine has not the environment of this process.
    settings = f"import os, sys; os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'; sys.path[:] = {sys.path!r}"
    program = f"{settings}\n{TRAINING}"
    attempt = script(engine, job_id, program, "400", devices=(card_id(),))
    wait_for_line(folder, job_id, "holding")
    return attempt


def digest(folder: Path, job_id: int) -> str:
    return log_of(folder, job_id).splitlines()[-1]


def test_a_training_that_parks_its_memory_twice_has_the_same_result(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender
) -> None:
    idle_mb = used_mb()
    training(engine, folder, 9)
    assert outcomes(engine)[9].kind is OutcomeKind.SUCCEEDED, log_of(folder, 9)
    attempt = training(engine, folder, 1)
    wait_for(lambda: bool(registered(str(folder), attempt.key)), "its registration")
    for _ in range(2):
        moved = suspended(suspender, attempt)
        assert moved.is_done
        assert moved.parked_mb is not None
        assert moved.parked_mb > 1000
        wait_for(lambda: used_mb() < idle_mb + 64, "the driver, which moves the rest")
        assert resumed(suspender, attempt, 4096).is_done
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED, log_of(folder, 1)
    assert digest(folder, 1) == digest(folder, 9)
    assert digest(folder, 1).startswith("digest ")
