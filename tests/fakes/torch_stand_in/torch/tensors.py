"""Tensors over numpy arrays, on the card or on the host."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import cuda

_GONE = 0xDD


class dtype:  # noqa: N801 - PyTorch's name
    def __init__(self, name: str) -> None:
        self.numpy = np.dtype(name)


class Storage:
    """Bytes; those of the card count in its allocator until the last reference is gone."""

    def __init__(self, content: Any, is_on_card: bool) -> None:
        self.content, self.is_on_card = content, is_on_card
        if is_on_card:
            weakref.finalize(self, _give_back, content, cuda.allocator.take(content.nbytes))


def _give_back(content: Any, given_back: Any) -> None:
    content[:] = _GONE
    given_back()


class Tensor:
    def __init__(self, storage: Storage, array: Any) -> None:
        self.storage, self.array = storage, array
        self.shape, self.nbytes = array.shape, array.nbytes

    def __getitem__(self, key: Any) -> "Tensor":
        return Tensor(self.storage, self.array[key])

    def __setitem__(self, key: Any, other: "Tensor") -> None:
        self[key].copy_(other)

    def view(self, kind: dtype) -> "Tensor":
        return Tensor(self.storage, self.array.view(kind.numpy))

    def split(self, sizes: list[int]) -> "tuple[Tensor, ...]":
        assert sum(sizes) == self.nbytes, "split_with_sizes expects the sizes to sum exactly"
        ends = np.cumsum(sizes)
        return tuple(self[end - size : end] for end, size in zip(ends, sizes, strict=True))

    def as_strided(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> "Tensor":
        """`offset` is from the storage's beginning."""
        size = self.array.itemsize
        last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        if all(shape) and (last + 1) * size > self.storage.content.nbytes:
            raise RuntimeError("setStorage: sizes and strides are out of bounds for the storage")
        where = self.storage.content.data if all(shape) else b""
        offset = offset * size if all(shape) else 0
        steps = tuple(stride * size for stride in strides)
        return Tensor(self.storage, np.ndarray(shape, self.array.dtype, where, offset, steps))

    def copy_(self, other: "Tensor", non_blocking: bool = False) -> "Tensor":
        """Only the arrays are kept until it is done: a card does not know who else holds its memory."""
        mine, its = self.array, other.array
        if mine.shape != its.shape:
            raise RuntimeError(f"The size of tensor a {mine.shape} must match the size of tensor b {its.shape}")
        if other.storage.is_on_card != self.storage.is_on_card:
            on_host = its if self.storage.is_on_card else mine
            cuda.unpinned_copies += not cuda.is_pinned(on_host.__array_interface__["data"][0], on_host.nbytes)
        if self.storage.is_on_card or other.storage.is_on_card:
            cuda.current_stream().queue(lambda: np.copyto(mine, its))
            is_on_card_alone = self.storage.is_on_card and other.storage.is_on_card
            if not non_blocking and not is_on_card_alone:
                cuda.current_stream().synchronize()
        else:
            np.copyto(mine, its)
        return self

    def clone(self) -> "Tensor":
        made = Tensor(*_made(self.nbytes, self.storage.is_on_card))
        kept = made.storage.content.view(self.array.dtype).reshape(self.shape)
        return Tensor(made.storage, kept).copy_(self)

    def numpy(self) -> Any:
        assert not self.storage.is_on_card, "can't convert cuda:0 device type tensor to numpy"
        return self.array

    def tolist(self) -> Any:
        if self.storage.is_on_card:
            cuda.current_stream().synchronize()
        return self.array.tolist()


def empty(nbytes: int, *, dtype: dtype, device: Any = None, pin_memory: bool = False) -> Tensor:
    assert dtype.numpy == np.uint8
    if device is not None:
        assert device.index == cuda.current_stream().device.index, "made on the stream of another card"
    made = Tensor(*_made(nbytes, device is not None))
    if pin_memory:
        cuda.pin(made.array.__array_interface__["data"][0], nbytes)
    return made


def _made(nbytes: int, is_on_card: bool) -> tuple[Storage, Any]:
    content = np.empty(nbytes, np.uint8)
    return Storage(content, is_on_card), content


def _foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> None:
    assert targets, "Tensor list must have at least one tensor."
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking)


def frombuffer(view: memoryview, *, dtype: dtype) -> Tensor:
    if not view.nbytes:
        raise ValueError("both buffer length (0) and count (-1) must not be 0")
    assert not view.readonly, "a buffer that is not writable makes PyTorch warn"
    content = np.frombuffer(view, dtype.numpy)
    return Tensor(Storage(content, is_on_card=False), content)
