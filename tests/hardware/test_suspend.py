"""On a machine with an NVIDIA card, driver 570 or later, and PyTorch: suspending does not change a job's results."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.model.job import Attempt, OutcomeKind, Started
from gpuyard.model.machine_snapshot import Device
from gpuyard.probes.local_machine import local_machine
from gpuyard.probes.nvidia.nvml import Nvml
from tests.integration.engine_fixture import engine, folder, log_of, outcomes, wait_for
from tests.integration.suspend_fixture import (
    begun,
    helper_pid,
    next_result,
    nothing_is_left,
    resumed,
    script,
    suspended,
    suspender,
    wait_for_line,
)

__all__ = ["engine", "folder", "nothing_is_left", "suspender"]

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")

# Computes 300 steps on the given GB of random numbers and prints a digest of the exact result.
WORK = """
import hashlib, os, sys, time
import torch
torch.manual_seed(17)
block = torch.randn(int(float(sys.argv[1]) * 1024), 1024, 256, device="cuda")
weight = torch.randn(256, 256, device="cuda")
print("holding", os.getpid(), flush=True)
for step in range(300):
    block[step % len(block)] = (block[step % len(block)] @ weight).tanh()
    noise = torch.randn(1024, 256, device="cuda")
    block[(step * 7) % len(block)] += noise
    torch.cuda.synchronize()
    time.sleep(0.01)
digest = hashlib.sha256()
for part in block:
    digest.update(part.cpu().numpy().tobytes())
print("digest", digest.hexdigest(), flush=True)
"""
# Two such programs, started by a shell.
TWO = '"$1" -c "$2" 1 & "$1" -c "$2" 1 & wait'
# A training loop with data from two worker processes.
LOADER = """
import hashlib
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        return torch.full((256, 256), float(index))

if __name__ == "__main__":
    total = torch.zeros(256, 256, device="cuda")
    torch.cuda.synchronize()
    print("holding", flush=True)
    for batch in DataLoader(Numbers(), batch_size=1, num_workers=2):
        total += batch.to("cuda").squeeze(0)
        torch.cuda.synchronize()
        import time; time.sleep(0.005)
    print("digest", float(total.sum()), flush=True)
"""
MANAGED = """
import ctypes, time
import torch
torch.zeros(1, device="cuda")
library, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
assert library.cuMemAllocManaged(ctypes.byref(pointer), ctypes.c_size_t(64 << 20), 1) == 0
ctypes.memset(pointer.value, 1, 64 << 20)
print("holding", flush=True)
for _ in range(1000):
    torch.ones(4, device="cuda").sum().item()
    time.sleep(0.01)
"""
# A tensor shared by two processes.
SHARED = """
import time
import torch, torch.multiprocessing as mp

def child(queue, back):
    tensor = queue.get()
    back.put(float(tensor.sum()))
    while True:
        tensor.add_(0)
        torch.cuda.synchronize()
        time.sleep(0.01)

if __name__ == "__main__":
    mp.set_start_method("spawn")
    queue, back = mp.Queue(), mp.Queue()
    process = mp.Process(target=child, args=(queue, back), daemon=True)
    process.start()
    tensor = torch.ones(1 << 20, device="cuda")
    queue.put(tensor)
    back.get()
    print("holding", flush=True)
    time.sleep(600)
"""
FILL = """
import sys
import torch
free, _ = torch.cuda.mem_get_info()
block = torch.empty(int(free - float(sys.argv[1]) * 2**30), dtype=torch.uint8, device="cuda")
print("filled", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def able(suspender: LocalSuspender) -> None:
    pytest.importorskip("torch")
    snapshot = local_machine().snapshot()
    attempt = Attempt(job_id=1, number=1, phase=Started(at=0.0, keeper_pid=1), boot_id=None, devices=(card().id,))
    refusal = suspender.refusal(attempt, snapshot)
    if refusal is not None:
        pytest.skip(refusal)


def card() -> Device:
    return Nvml().read(10).devices[0]


def used_mb() -> float:
    return card().memory_used_mb or 0.0


def holding(engine: LocalEngine, folder: Path, job_id: int, program: str, *arguments: str) -> Attempt:
    attempt = script(engine, job_id, program, *arguments, devices=(card().id,))
    wait_for_line(folder, job_id, "holding")
    return attempt


def digests(folder: Path, job_id: int) -> list[str]:
    return [line for line in log_of(folder, job_id).splitlines() if line.startswith("digest")]


@pytest.fixture
def undisturbed(engine: LocalEngine, folder: Path) -> str:
    """The digest of an undisturbed run."""
    holding(engine, folder, 9, WORK, "2")
    assert outcomes(engine)[9].kind is OutcomeKind.SUCCEEDED
    return digests(folder, 9)[0]


def test_a_program_suspended_twice_has_the_same_result(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, undisturbed: str
) -> None:
    idle = used_mb()
    attempt = holding(engine, folder, 1, WORK, "2")
    for _ in range(2):
        assert used_mb() > idle + 2048
        assert suspended(suspender, attempt).is_done
        assert used_mb() < idle + 64
        assert resumed(suspender, attempt, 3072).is_done
        assert used_mb() > idle + 2048
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
    assert digests(folder, 1) == [undisturbed]


def test_a_tree_of_two_programs_is_suspended_together(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender
) -> None:
    idle = used_mb()
    attempt = begun(engine, 1, "/bin/sh", "-c", TWO, "sh", sys.executable, WORK, devices=(card().id,))
    wait_for_line(folder, 1, "holding")
    wait_for(lambda: log_of(folder, 1).count("holding") == 2, "two that hold memory")
    assert suspended(suspender, attempt).is_done
    assert used_mb() < idle + 64
    assert resumed(suspender, attempt, 4096).is_done
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
    first, second = digests(folder, 1)
    assert first == second


def test_a_program_with_worker_processes_is_resumed(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender
) -> None:
    attempt = holding(engine, folder, 1, LOADER)
    assert suspended(suspender, attempt).is_done
    assert resumed(suspender, attempt, 1024).is_done
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
    assert digests(folder, 1) == [f"digest {sum(range(400)) * 65536.0}"]


def test_without_free_memory_a_job_stays_suspended_and_can_be_resumed_later(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, undisturbed: str
) -> None:
    attempt = holding(engine, folder, 1, WORK, "2")
    assert suspended(suspender, attempt).is_done
    with subprocess.Popen(
        [sys.executable, "-c", FILL, "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as filler:
        assert filler.stdout is not None
        assert filler.stdout.readline() == "filled\n"
        moved = resumed(suspender, attempt, 3072)
        assert (moved.is_done, moved.is_ruined) == (False, False)
        assert "not enough memory on" in moved.text
        filler.communicate()
    assert resumed(suspender, attempt, 3072).is_done
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
    assert digests(folder, 1) == [undisturbed]


def test_a_second_helper_finishes_the_work_of_a_killed_one(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, undisturbed: str
) -> None:
    attempt = holding(engine, folder, 1, WORK, "2")
    idle_below = used_mb() - 2048
    suspender.suspend(attempt)
    wait_for(lambda: os.path.exists(folder / "suspending" / "1.1.lock"), "the helper")
    os.kill(helper_pid(), signal.SIGKILL)
    assert next_result(suspender).is_done
    assert used_mb() < idle_below
    suspender.resume(attempt, {card().id: 3072.0})
    wait_for(lambda: used_mb() > idle_below, "the start of the restore")
    os.kill(helper_pid(), signal.SIGKILL)
    assert next_result(suspender).is_done
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
    assert digests(folder, 1) == [undisturbed]


@pytest.mark.parametrize(("program", "says"), [(MANAGED, "managed memory"), (SHARED, "share memory")])
def test_programs_that_the_driver_cannot_restore_are_not_suspended(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, program: str, says: str
) -> None:
    path = folder / "program.py"  # a spawned process imports it again
    path.write_text(program)
    attempt = begun(engine, 1, sys.executable, str(path), devices=(card().id,))
    wait_for_line(folder, 1, "holding")
    before = used_mb()
    moved = suspended(suspender, attempt)
    assert (moved.is_done, moved.is_ruined) == (False, False)
    assert says in moved.text
    assert abs(used_mb() - before) < 64
    assert engine.signal(attempt, 0) > 0, "it runs on"


def test_a_suspended_program_ends_on_sigterm(engine: LocalEngine, folder: Path, suspender: LocalSuspender) -> None:
    attempt = holding(engine, folder, 1, WORK, "1")
    assert suspended(suspender, attempt).is_done
    engine.signal(attempt, signal.SIGTERM)
    engine.signal(attempt, signal.SIGCONT)
    assert outcomes(engine)[1].status == 128 + signal.SIGTERM
