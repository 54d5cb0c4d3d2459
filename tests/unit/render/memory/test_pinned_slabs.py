"""Pinned memory in slabs, on a stand-in for PyTorch that records what is pinned."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuyard.recipes.render.memory.cuda_memory import CudaMemory, PinnedSlabs, slab_size
from gpuyard.recipes.render.memory.device_memory import LARGEST, SMALLEST, page_size
from tests.fakes import torch_stand_in

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
PAGE = 256 * KB


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    return torch_stand_in.install(monkeypatch)


@pytest.fixture
def slabs(torch: Any) -> Iterator[PinnedSlabs]:
    with contextlib.closing(PinnedSlabs(torch, torch.device("cuda", 0))) as slabs:
        yield slabs


def address(page: memoryview) -> int:
    return int(np.frombuffer(page, np.uint8).__array_interface__["data"][0])


def test_a_slab_is_small_relative_to_the_ram_budget_and_holds_whole_pages() -> None:
    assert {ram: slab_size(page_size(ram * GB)) for ram in (1, 2, 4, 90)} == {
        1: 4 * MB, 2: 8 * MB, 4: 16 * MB, 90: 16 * MB,
    }  # fmt: skip
    assert slab_size(SMALLEST) == 2 * MB
    assert slab_size(LARGEST) == 16 * MB
    assert slab_size(65 * MB) == 66 * MB


def test_pages_are_pinned_writable_and_do_not_overlap(slabs: PinnedSlabs, torch: Any) -> None:
    pages = [slabs.page(PAGE) for _ in range(20)]
    for number, page in enumerate(pages):
        assert page is not None
        assert torch.cuda.is_pinned(address(page), page.nbytes)
        page[:] = bytes([number]) * PAGE
    assert [set(page or b"") for page in pages] == [{number} for number in range(20)]


def test_many_pages_are_pinned_with_one_call_on_whole_huge_pages(slabs: PinnedSlabs, torch: Any) -> None:
    for _ in range(20):
        slabs.page(PAGE)
    registered = torch.cuda.cudart().registered
    assert list(registered.values()) == [4 * MB, 4 * MB]
    assert all(start % (2 * MB) == 0 for start in registered)


def test_threads_that_need_pages_at_the_same_time_share_a_slab(slabs: PinnedSlabs, torch: Any) -> None:
    barrier = threading.Barrier(8)

    def take(_: int) -> int:
        barrier.wait()
        page = slabs.page(PAGE)
        assert page is not None
        return address(page)

    with ThreadPoolExecutor(8) as pool:
        taken = set(pool.map(take, range(8)))
    assert len(taken) == 8
    assert len(torch.cuda.cudart().registered) == 1


def test_the_threads_that_render_do_not_pin(slabs: PinnedSlabs, torch: Any) -> None:
    """CUDA keeps the error of a refused call for the thread, and PyTorch raises it after the thread's next kernel."""
    slabs.page(PAGE)
    assert torch.cuda.cudart().callers.isdisjoint({threading.current_thread().name})


def test_closing_unpins_and_frees_the_memory_of_pages_in_use_too(torch: Any) -> None:
    slabs = PinnedSlabs(torch, torch.device("cuda", 0))
    page = slabs.page(PAGE)
    assert page is not None
    page[:4] = b"used"
    slabs.close()
    assert not torch.cuda.cudart().registered
    assert bytes(page[:4]) == bytes(4), "the kernel has taken the memory back"
    assert slabs.page(PAGE) is None


def test_pinned_memory_is_not_freed_before_it_is_unpinned(slabs: PinnedSlabs, torch: Any) -> None:
    """Else `close` would unpin and empty memory that belongs to others by then."""
    assert slabs.page(16 * MB) is not None  # a whole slab, of which no view is left
    ((start, nbytes),) = torch.cuda.cudart().registered.items()
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    assert any(int(first, 16) <= start and start + nbytes <= int(last, 16) for first, last in ranges)


def test_the_memory_of_a_card_unpins_all_pages_when_it_is_closed(torch: Any) -> None:
    with contextlib.closing(CudaMemory(0, 256 * MB)) as memory:
        memory.page(PAGE)
        assert torch.cuda.cudart().registered
    assert not torch.cuda.cudart().registered


def test_pytorch_pins_pages_if_the_driver_refuses_a_slab(torch: Any) -> None:
    torch.cuda.cudart().error = 801
    with contextlib.closing(CudaMemory(0, 256 * MB)) as memory:
        pages = [memory.page(PAGE) for _ in range(2)]
        torch.cuda.cudart().error = 0
        pages.append(memory.page(PAGE))
        assert all(torch.cuda.is_pinned(address(page), PAGE) for page in pages)
        assert not torch.cuda.cudart().registered, "a slab that was refused is not tried again"


def test_pytorch_pins_pages_if_there_is_no_memory_for_a_slab(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("gpuyard.recipes.render.memory.cuda_memory.mmap.mmap", refuse)
    with contextlib.closing(CudaMemory(0, 256 * MB)) as memory:
        page = memory.page(PAGE)
        assert torch.cuda.is_pinned(address(page), PAGE)


def test_a_kernel_without_huge_pages_uses_ordinary_ones(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuyard.recipes.render.memory import cuda_memory as pinned_slabs

    monkeypatch.setattr(pinned_slabs, "_USE_HUGE_PAGES", 9999)
    monkeypatch.setattr(pinned_slabs, "_FILL", 9998)
    with contextlib.closing(PinnedSlabs(torch, torch.device("cuda", 0))) as slabs:
        page = slabs.page(PAGE)
        assert page is not None
        page[:4] = b"used"
        assert torch.cuda.is_pinned(address(page), PAGE)
