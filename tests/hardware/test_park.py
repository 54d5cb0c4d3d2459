"""On a machine with an NVIDIA card, driver 570 or later, and PyTorch: a training that parks its memory has the same
result as one that is not disturbed. So has one of two ranks."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.model.job import Attempt, OutcomeKind
from gpuyard.probes.nvidia.nvml import Nvml
from gpuyard.system.parking_protocol import registered
from tests.integration.engine_fixture import engine, folder, log_of, outcomes, wait_for
from tests.integration.suspend_fixture import (
    begun,
    nothing_is_left,
    resumed,
    script,
    suspended,
    suspender,
    wait_for_line,
)

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

# One of two ranks that train together on one card: STEPS FILE RANK. Rank 1 is slower, so rank 0 is always ahead.
RANK = """
import hashlib, sys, time
import torch
import gpuyard
steps, file, rank = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.use_deterministic_algorithms(True)
torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
torch.manual_seed(5)
model = torch.nn.Linear(4096, 4096).cuda()
together = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(together.parameters(), lr=1e-4)
noise = torch.randn(128, 1 << 20, device="cuda")
parking = gpuyard.torch.parkable(together, optimizer, noise)
torch.manual_seed(7 + rank)
for step in range(steps):
    optimizer.zero_grad()
    together(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    time.sleep(0.01 * rank)
digest = hashlib.sha256()
for each in [*model.parameters(), *optimizer.state[model.weight].values(), noise]:
    digest.update(each.detach().cpu().contiguous().numpy().tobytes())
print("digest", digest.hexdigest(), flush=True)
"""
BOTH_RANKS = '"$@" 0 & "$@" 1 && wait $!'

# Trains a sharded model whose memory is parked between its steps if an argument is given, and prints a digest.
SHARDED = """
import hashlib, sys
import torch
from torch.distributed.fsdp import fully_shard
from gpuyard.scripting.park_tensors import TensorParking
torch.use_deterministic_algorithms(True)
torch.distributed.init_process_group("nccl", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 2048)).cuda()
for each in [*model, model]:
    fully_shard(each)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
parking = TensorParking([model, optimizer])
for step in range(10):
    optimizer.zero_grad()
    model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    if len(sys.argv) > 2:
        before = torch.cuda.memory_allocated()
        assert parking.park() >= 4 * 2 * 4 * 2048 ** 2
        assert torch.cuda.memory_allocated() < before / 2
        parking.bring_back()
digest = hashlib.sha256()
for each in model.parameters():
    digest.update(each.full_tensor().detach().cpu().numpy().tobytes())
print("digest", digest.hexdigest(), flush=True)
"""
# A program of the engine has not the environment of this process.
SETTINGS = f"import os, sys; os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'; sys.path[:] = {sys.path!r}\n"


@pytest.fixture(autouse=True)
def able() -> None:
    pytest.importorskip("torch")


def card_id() -> str:
    return Nvml().read(10).devices[0].id


def used_mb() -> float:
    return Nvml().read(10).devices[0].memory_used_mb or 0.0


def training(engine: LocalEngine, folder: Path, job_id: int) -> Attempt:
    attempt = script(engine, job_id, SETTINGS + TRAINING, "400", devices=(card_id(),))
    wait_for_line(folder, job_id, "holding")
    return attempt


def both_ranks(engine: LocalEngine, job_id: int, file: Path) -> Attempt:
    command = (sys.executable, "-c", SETTINGS + RANK, "200", str(file))
    return begun(engine, job_id, "/bin/sh", "-c", BOTH_RANKS, "sh", *command, devices=(card_id(),))


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


def test_two_ranks_that_park_their_memory_twice_have_the_same_result(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, tmp_path: Path
) -> None:
    idle_mb = used_mb()
    both_ranks(engine, 9, tmp_path / "undisturbed")
    assert outcomes(engine)[9].kind is OutcomeKind.SUCCEEDED, log_of(folder, 9)
    attempt = both_ranks(engine, 1, tmp_path / "parked")
    wait_for(lambda: suspender.can_park(attempt), "the registrations of both")
    for _ in range(2):
        moved = suspended(suspender, attempt)
        assert (moved.is_done, moved.text) == (True, "")
        assert moved.parked_mb is not None
        assert moved.parked_mb > 1400
        wait_for(lambda: used_mb() < idle_mb + 2 * 1024, "no more than two contexts")
        assert resumed(suspender, attempt, 4096).is_done
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED, log_of(folder, 1)
    digests = [line for job in (1, 9) for line in log_of(folder, job).splitlines() if line.startswith("digest ")]
    assert len(digests) == 4
    assert len(set(digests)) == 1, "all ranks, with and without parking"


def test_a_sharded_model_that_parks_has_the_same_result(tmp_path: Path) -> None:
    def train(*arguments: str) -> str:
        command = [sys.executable, "-c", SETTINGS + SHARDED, str(tmp_path / f"store{len(arguments)}"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert train("parks") == train()
