"""The contract of a device's memory, over host memory and over CUDA memory with a stand-in for PyTorch."""

import contextlib
from collections.abc import Iterator

import pytest

from gpuyard.recipes.render.memory.cuda_memory import CudaMemory
from gpuyard.recipes.render.memory.device_memory import DeviceMemory
from gpuyard.recipes.render.memory.host_memory import HostMemory
from tests.contract.residency_memory import BUDGET, MemoryContract
from tests.fakes import torch_stand_in


class TestHost(MemoryContract):
    @pytest.fixture
    def memory(self) -> Iterator[DeviceMemory]:
        with contextlib.closing(HostMemory(BUDGET)) as memory:
            yield memory


class TestCudaOnAStandIn(MemoryContract):
    @pytest.fixture
    def memory(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMemory]:
        torch_stand_in.install(monkeypatch)
        with contextlib.closing(CudaMemory(0, BUDGET)) as memory:
            yield memory
