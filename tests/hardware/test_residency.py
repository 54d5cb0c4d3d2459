"""On a machine with an NVIDIA card and PyTorch: the memory of the card, its budget, and upload speed."""

import gc
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gpuyard.errors import DeviceFull
from gpuyard.probes.nvidia.nvml import Nvml
from gpuyard.recipes.render.memory.cuda_memory import CudaMemory
from gpuyard.recipes.render.memory.device_memory import LARGEST, DeviceMemory, as_device_full
from gpuyard.recipes.render.memory.leased_memory import open_device
from tests.contract.residency_memory import BUDGET, MemoryContract

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")

MB = 1048576
GB = 1024 * MB


@pytest.fixture(autouse=True)
def torch() -> Any:
    """Import PyTorch, and free card memory that earlier tests left to the garbage collector."""
    torch = pytest.importorskip("torch")
    gc.collect()
    torch.cuda.empty_cache()
    return torch


class TestCard(MemoryContract):
    @pytest.fixture
    def memory(self) -> Iterator[DeviceMemory]:
        with open_device(BUDGET, "cuda") as memory:
            yield memory


def best_s(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def test_uploading_pages_is_nearly_as_fast_as_one_copy(torch: Any) -> None:
    size = 2 * GB
    with open_device(5 * GB, "cuda") as memory:
        plain = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        pages = [memory.page(LARGEST) for _ in range(size // LARGEST)]
        buffer = memory.allocate(size)
        target = torch.empty(size, dtype=torch.uint8, device="cuda")

        def copy() -> None:
            target.copy_(plain, non_blocking=True)
            torch.cuda.synchronize()

        by_one_copy, by_pages = best_s(copy), best_s(lambda: memory.upload(pages, buffer))
        assert by_pages <= by_one_copy / 0.8, f"{size / GB / by_pages:.1f} of {size / GB / by_one_copy:.1f} GB/s"


def test_pages_are_pinned_until_the_memory_is_closed(torch: Any) -> None:
    with open_device(GB, "cuda") as memory:
        pages = [torch.frombuffer(memory.page(4 * MB), dtype=torch.uint8) for _ in range(9)]
        assert all(page.is_pinned() for page in pages)
    assert not any(page.is_pinned() for page in pages)


def test_pytorch_never_exceeds_the_budget(torch: Any) -> None:
    budget = 1 * GB + 7 * MB
    with open_device(budget, "cuda") as memory:
        assert isinstance(memory, CudaMemory)

        def work(size: int) -> int:
            """Allocate assets and renderer buffers until memory runs out."""
            refused = 0
            with memory.lane() as lane:
                for _ in range(20):
                    held = []
                    try:
                        for _ in range(100):
                            held.append(memory.allocate(size))
                            held.append(torch.empty(size // 3, dtype=torch.uint8, device=memory.name))
                    except (DeviceFull, torch.cuda.OutOfMemoryError) as error:
                        refused += as_device_full(error) is not None
                    lane.finish()
            return refused

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, (9 * MB, 31 * MB, 130 * MB, 401 * MB)))
        assert budget / 2 < torch.cuda.max_memory_reserved(0) <= budget
        memory.empty_cache()
        memory.free(memory.allocate(budget - 24 * MB))
        assert torch.cuda.max_memory_reserved(0) <= budget


def test_a_failed_allocation_succeeds_after_memory_is_freed() -> None:
    with open_device(2 * GB, "cuda") as memory:
        first, second = memory.allocate(GB), memory.allocate(GB // 2)
        with pytest.raises(DeviceFull, match="out of memory"):
            memory.allocate(GB)
        memory.free(first)
        third = memory.allocate(GB)
        for buffer in (second, third):
            memory.free(buffer)


def test_uploads_overlap_with_computation(torch: Any) -> None:
    """Computing and uploading at the same time takes less than one after the other."""
    size = 2 * GB
    with open_device(6 * GB, "cuda") as memory, memory.lane() as lane:
        pages = [memory.page(LARGEST) for _ in range(size // LARGEST)]
        buffer = memory.allocate(size)
        matrix = torch.rand(8192, 8192, device=memory.name)

        def draw() -> None:
            for _ in range(4):
                torch.mm(matrix, matrix)

        def draw_alone() -> None:
            draw()
            lane.finish()

        def both() -> None:
            draw()
            memory.upload(pages, buffer)
            lane.finish()

        apart = best_s(draw_alone) + best_s(lambda: memory.upload(pages, buffer))
        assert best_s(both) < 0.9 * apart


def test_the_budget_is_a_lease_in_the_ledger() -> None:
    card = Nvml().read(10).devices[0]
    total_mb = card.memory_total_mb or 0.0
    with open_device(int(total_mb * 0.6) * MB, "cuda", label="night shift") as memory:
        assert memory.used() < 64 * MB, "leased, not allocated; cuBLAS keeps a workspace of earlier tests"
        shown = gpuyard("leases", "--json")
        (lease,) = json.loads(shown.stdout)["leases"]
        assert lease["label"] == "night shift"
        assert [(share["device_id"], share["reserved_mb"]) for share in lease["shares"]] == [
            (card.id, float(int(total_mb * 0.6)))
        ]
        refused = gpuyard("run", "--vram", f"{total_mb * 0.6:.0f}MB", "--wait", "1s", "--", "true")
        assert refused.returncode == 124
        assert "(night shift)" in refused.stderr
    assert gpuyard("run", "--vram", f"{total_mb * 0.6:.0f}MB", "--wait", "60s", "--", "true").returncode == 0


def gpuyard(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gpuyard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
