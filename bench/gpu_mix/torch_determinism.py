"""What all programs with PyTorch share: the same results in each run, and the peak of memory."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def sees_gpu() -> bool:
    return torch.cuda.is_available()


def begin(seed: int) -> torch.device:
    """Make PyTorch deterministic, and return the device to use."""
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and no program reads such memory
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("high")
    # The fused kernels of attention add up gradients in any order.
    for enable in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, enable)(enabled=False)
    return torch.device("cuda" if sees_gpu() else "cpu")


def peak_mb() -> float:
    return torch.cuda.max_memory_reserved() / 2**20 if sees_gpu() else 0.0


def as_bytes(tensors: Iterable[Tensor]) -> Iterator[bytes]:
    for tensor in tensors:
        yield tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
