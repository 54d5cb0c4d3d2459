"""On a machine with an NVIDIA card, driver 570 or later, and PyTorch: whoever is suspended notices nothing."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuyard.core.job.job import Attempt, OutcomeKind
from gpuyard.core.snapshot import Device
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
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

# Works for 300 steps on so many GB of random numbers and says what they came to, bit for bit.
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
# Two that each work, started by a shell.
TWO = '"$1" -c "$2" 1 & "$1" -c "$2" 1 & wait'
# A training loop whose data come from two worker processes.
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
# A tensor that lives in two processes.
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
    attempt = Attempt(job_id=1, number=1, keeper_pid=1, boot_id=None, started_at=0.0, devices=(card().id,))
    refusal = suspender.refusal(attempt, snapshot)
    if refusal is not None:
        pytest.skip(refusal)


def card() -> Device:
    return Nvml().read(10).devices[0]


def used_mb() -> float:
    return card().memory_used_mb or 0.0


def holding(engine: LocalEngine, folder: Path, job_id: int, program: str, *words: str) -> Attempt:
    attempt = script(engine, job_id, program, *words, devices=(card().id,))
    wait_for_line(folder, job_id, "holding")
    return attempt


def digests(folder: Path, job_id: int) -> list[str]:
    return [line for line in log_of(folder, job_id).splitlines() if line.startswith("digest")]


@pytest.fixture
def undisturbed(engine: LocalEngine, folder: Path) -> str:
    """What the work comes to by itself."""
    holding(engine, folder, 9, WORK, "2")
    assert outcomes(engine)[9].kind is OutcomeKind.SUCCEEDED
    return digests(folder, 9)[0]


def test_a_program_that_is_suspended_twice_comes_to_the_same_result(
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


def test_a_tree_of_two_programs_is_suspended_as_one(
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


def test_a_program_with_worker_processes_goes_on(engine: LocalEngine, folder: Path, suspender: LocalSuspender) -> None:
    attempt = holding(engine, folder, 1, LOADER)
    assert suspended(suspender, attempt).is_done
    assert resumed(suspender, attempt, 1024).is_done
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
    assert digests(folder, 1) == [f"digest {sum(range(400)) * 65536.0}"]


def test_without_room_it_stays_suspended_and_is_not_ruined(
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
        assert "no room" in moved.text
        filler.communicate()
    assert resumed(suspender, attempt, 3072).is_done
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
    assert digests(folder, 1) == [undisturbed]


def test_a_killed_helper_is_followed_by_one_that_finishes(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, undisturbed: str
) -> None:
    attempt = holding(engine, folder, 1, WORK, "2")
    idle_below = used_mb() - 2048
    suspender.suspend(attempt)
    wait_for(lambda: os.path.exists(folder / "suspending" / "1.1.lock"), "the helper at work")
    os.kill(helper_pid(), signal.SIGKILL)
    assert next_result(suspender).is_done
    assert used_mb() < idle_below
    suspender.resume(attempt, {card().id: 3072.0})
    wait_for(lambda: used_mb() > idle_below, "the restore under way")
    os.kill(helper_pid(), signal.SIGKILL)
    assert next_result(suspender).is_done
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
    assert digests(folder, 1) == [undisturbed]


@pytest.mark.parametrize(("program", "says"), [(MANAGED, "managed memory"), (SHARED, "share memory")])
def test_what_the_driver_cannot_put_back_is_left_as_it_is(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, program: str, says: str
) -> None:
    path = folder / "program.py"  # a spawned process reads it again
    path.write_text(program)
    attempt = begun(engine, 1, sys.executable, str(path), devices=(card().id,))
    wait_for_line(folder, 1, "holding")
    before = used_mb()
    moved = suspended(suspender, attempt)
    assert (moved.is_done, moved.is_ruined) == (False, False)
    assert says in moved.text
    assert abs(used_mb() - before) < 64
    assert engine.signal(attempt, 0) > 0, "it runs on"


def test_a_suspended_program_ends_when_it_is_asked_to(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender
) -> None:
    attempt = holding(engine, folder, 1, WORK, "1")
    assert suspended(suspender, attempt).is_done
    engine.signal(attempt, signal.SIGTERM)
    engine.signal(attempt, signal.SIGCONT)
    assert outcomes(engine)[1].status == 128 + signal.SIGTERM
