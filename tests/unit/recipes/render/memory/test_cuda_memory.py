"""CudaMemory beyond its contract, on a stand-in for PyTorch with one card of 1 GB."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuyard.errors import DeviceFull, EnvironmentFault, UserError
from gpuyard.recipes.render.memory.cuda_memory import CudaMemory, PinnedSlabs, slab_size
from gpuyard.recipes.render.memory.device_memory import LARGEST, SMALLEST, page_size
from tests.fakes import torch_stand_in

MB, GB = 1 << 20, 1 << 30
BUDGET = 256 * MB
PAGE = MB // 4


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    return torch_stand_in.install(monkeypatch)


@pytest.fixture
def memory(torch: Any) -> Iterator[CudaMemory]:
    with contextlib.closing(CudaMemory(0, BUDGET)) as memory:
        yield memory


def as_bytes(memory: CudaMemory, buffer: Any, nbytes: int) -> Any:
    return memory.view(buffer, dtype="u1", shape=(nbytes,), offset=0, strides=(1,))


@pytest.mark.parametrize("size", [7 * MB, 21 * MB, 33 * MB, 100 * MB])
def test_pytorch_never_reserves_more_than_the_budget(memory: CudaMemory, torch: Any, size: int) -> None:
    held = []
    with contextlib.suppress(DeviceFull):
        while memory.used() <= BUDGET:
            held.append(memory.allocate(size))
    assert BUDGET // 2 < torch.cuda.max_memory_reserved(0) <= BUDGET


def test_allocations_of_a_renderer_count_towards_the_budget(memory: CudaMemory, torch: Any) -> None:
    buffer = memory.allocate(150 * MB)
    with memory.lane(), pytest.raises(torch.OutOfMemoryError):
        memory.clone(as_bytes(memory, buffer, 150 * MB))
    memory.free(buffer)


def test_the_message_is_the_first_line_of_pytorchs_error(memory: CudaMemory) -> None:
    with pytest.raises(DeviceFull) as caught:
        memory.allocate(300 * MB)
    assert str(caught.value).startswith("CUDA out of memory. Tried to allocate 300.00 MiB.")
    assert "\n" not in str(caught.value)


def test_another_error_of_pytorch_is_passed_on(memory: CudaMemory, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "empty", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        memory.allocate(MB)


def test_closing_gives_all_memory_back_and_each_instance_counts_its_own_peak(torch: Any) -> None:
    memory = CudaMemory(0, BUDGET)
    memory.free(memory.allocate(100 * MB))
    memory.close()
    assert torch.cuda.mem_get_info(0)[0] == torch.cuda.TOTAL
    torch.empty(500 * MB, dtype=torch.uint8, device=torch.device("cuda", 0))
    for size in (100 * MB, 10 * MB):
        with contextlib.closing(CudaMemory(0, BUDGET)) as memory:
            memory.free(memory.allocate(size))
            assert memory.peak() == size


@pytest.mark.parametrize(("nbytes", "message", "hint"), [
    (2048 * MB, r"2 GB is more than cuda:0 has", "it has 1 GB"),
    (16 * MB, "16 MB is too small a budget for cuda:0", "steps of 20 MB"),
])  # fmt: skip
def test_an_impossible_budget_is_refused(torch: Any, nbytes: int, message: str, hint: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        CudaMemory(0, nbytes)
    assert hint in str(caught.value.hint)


def test_arrays_of_a_type_share_a_tensor(memory: CudaMemory, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renderer gets new arrays for every picture, and each tensor on the way takes time in the interpreter."""
    buffer = memory.allocate(64)
    made: list[object] = []
    plain = torch.Tensor.view

    def view(tensor: Any, kind: Any) -> Any:
        made.append(kind)
        return plain(tensor, kind)

    monkeypatch.setattr(torch.Tensor, "view", view)
    arrays = [memory.view(buffer, dtype="f4", shape=(4,), offset=16 * n, strides=(1,)) for n in range(4)]
    assert len(made) == 1
    assert len({array.array.__array_interface__["data"][0] for array in arrays}) == 4


def test_an_array_needs_a_buffer_and_starts_at_a_multiple_of_its_item_size(memory: CudaMemory) -> None:
    buffer = memory.allocate(MB)
    memory.view(buffer, dtype="f4", shape=(4,), offset=0, strides=(1,))
    memory.free(buffer)
    assert memory.used() == 0
    with pytest.raises(TypeError):
        memory.view(buffer, dtype="f4", shape=(4,), offset=0, strides=(1,))
    buffer = memory.allocate(64)
    with pytest.raises(ValueError, match="an array of f4 cannot start at byte 6"):
        memory.view(buffer, dtype="f4", shape=(2,), offset=6, strides=(1,))


def test_copies_use_pinned_memory_in_both_directions_and_skip_empty_parts(memory: CudaMemory, torch: Any) -> None:
    pages = [memory.page(1 << 16) for _ in range(3)]
    views = [pages[0][5:], pages[1], pages[2][:77]]
    buffer = memory.allocate(sum(view.nbytes for view in views))
    memory.upload(views, buffer)
    memory.download(buffer, views)
    assert torch.cuda.unpinned_copies == 0
    memory.upload([memoryview(bytearray(10))], buffer)
    assert torch.cuda.unpinned_copies == 1, "the stand-in detects unpinned memory"
    page, buffer = memory.page(4096), memory.allocate(4)
    page[:4] = b"kept"
    memory.upload([page[:0]], buffer)
    memory.upload([page[:0], page[:2], page[8:8], page[2:4]], buffer)
    assert bytes(as_bytes(memory, buffer, 4).tolist()) == b"kept"


def test_an_asset_is_copied_in_one_call_each_way(
    memory: CudaMemory, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of PyTorch competes for the interpreter with the threads that render."""
    pages = [memory.page(1 << 16) for _ in range(40)]
    buffer = memory.allocate(40 << 16)
    calls: list[int] = []
    plain = torch._foreach_copy_

    def copy(targets: Any, sources: Any, **options: Any) -> None:
        calls.append(len(targets))
        plain(targets, sources, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    for number, page in enumerate(pages):
        page[:] = bytes([number]) * page.nbytes
    memory.upload(pages, buffer)
    for page in pages:
        page[:] = bytes(page.nbytes)
    memory.download(buffer, pages)
    assert calls == [40, 40]
    assert [set(page) for page in pages] == [{number} for number in range(40)]


def test_unpinned_ram_is_the_fallback_if_no_more_can_be_pinned(
    memory: CudaMemory, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def refuse(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    torch.cuda.cudart().error = 2
    page = memory.page(4096)
    page[:4] = b"sent"
    buffer = memory.allocate(4)
    memory.upload([page[:4]], buffer)
    assert as_bytes(memory, buffer, 4).tolist() == list(b"sent")
    assert torch.cuda.unpinned_copies == 1


def test_an_array_kept_by_a_renderer_stays_valid_after_its_buffer_is_freed(memory: CudaMemory) -> None:
    buffer = memory.allocate(4)
    page = memory.page(4096)
    page[:4] = b"kept"
    memory.upload([page[:4]], buffer)
    kept = as_bytes(memory, buffer, 4)
    memory.free(buffer)
    assert bytes(kept.tolist()) == b"kept"
    assert memory.used() == 512, "and still counts as used"
    del kept
    assert memory.used() == 0


def test_an_upload_runs_after_pytorch_has_filled_new_memory(
    memory: CudaMemory, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `torch.use_deterministic_algorithms`, `empty` fills new memory on the current stream."""
    empty = torch.empty

    def filled(nbytes: int, **options: Any) -> Any:
        made = empty(nbytes, **options)
        if "device" in options:
            torch.cuda.current_stream().queue(lambda: made.array.fill(0xFF))
        return made

    monkeypatch.setattr(torch, "empty", filled)
    buffer = memory.allocate(4)
    page = memory.page(4096)
    page[:4] = b"here"
    memory.upload([page[:4]], buffer)
    torch.cuda.synchronize()
    memory.download(buffer, [page[8:12]])
    assert bytes(page[8:12]) == b"here"


@pytest.mark.parametrize("dtype", ["u2", "S8", "m8"])
def test_a_type_unknown_to_this_pytorch_is_named(
    memory: CudaMemory, torch: Any, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.delattr(torch, "uint16")
    buffer = memory.allocate(64)
    with pytest.raises(EnvironmentFault, match=rf"PyTorch 2\.9\.0\S* has no type for arrays of '{dtype}'"):
        memory.view(buffer, dtype=dtype, shape=(2,), offset=0, strides=(1,))


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


def test_many_pages_are_pinned_with_one_call_on_whole_huge_pages_and_do_not_overlap(
    slabs: PinnedSlabs, torch: Any
) -> None:
    """CUDA keeps the error of a refused call for the thread, and PyTorch raises it after the thread's next kernel."""
    pages = [slabs.page(PAGE) for _ in range(20)]
    for number, page in enumerate(pages):
        assert page is not None
        assert torch.cuda.is_pinned(address(page), page.nbytes)
        page[:] = bytes([number]) * PAGE
    assert [set(page or b"") for page in pages] == [{number} for number in range(20)]
    registered = torch.cuda.cudart().registered
    assert list(registered.values()) == [4 * MB, 4 * MB]
    assert all(start % (2 * MB) == 0 for start in registered)
    assert torch.cuda.cudart().callers.isdisjoint({threading.current_thread().name}), "threads that render do not pin"


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
