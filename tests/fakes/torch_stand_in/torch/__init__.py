"""Tensors, of which a few things can be asked."""

from torch import cuda, version
from torch.tensors import Tensor, _foreach_copy_, dtype, empty, frombuffer

__version__ = "2.9.0+stand.in"
__all__ = ["OutOfMemoryError", "Tensor", "_foreach_copy_", "cuda", "device", "dtype", "empty", "frombuffer", "version"]

OutOfMemoryError = cuda.OutOfMemoryError

_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
globals().update({name: dtype(name) for name in _NAMES.split()})


class device:  # noqa: N801 - PyTorch's name
    def __init__(self, type: str, index: int) -> None:  # noqa: A002
        self.type, self.index = type, index
