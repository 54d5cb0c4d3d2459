"""Make the leased GPU PyTorch's current device in the thread that holds the lease.

Once a process has initialized CUDA, no environment variable changes what it sees: the current device is all that can be
chosen. It is set when the lease starts, or, if PyTorch is imported while the lease is held, by an import hook, which is
removed then, or with the last lease. If another thread imports PyTorch while both hold leases, this thread keeps device
0."""

import contextlib
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_thread = threading.local()
_lock = threading.Lock()


class TorchDeviceSelection:
    """The device of a lease: PyTorch's current device in this thread from `start` to `end`. `number` returns the
    device's number, or None if CUDA does not see it. It is called at each selection, as a script may change what CUDA
    sees until CUDA is initialized. A selection ends when it is garbage-collected."""

    def __init__(self, number: Callable[[], int | None]) -> None:
        self.number = number

    def start(self) -> None:
        _selections().append(weakref.ref(self))
        _all.add(self)
        if sys.modules.get("torch") is None:
            _hook.install()
        if sys.modules.get("torch") is not None:  # checked again: another thread may import it now
            _select_current(importlib.import_module("torch"))  # waits for that import

    def end(self) -> None:
        """Return to the device of the enclosing lease, if any."""
        was_current = _current() is self
        with contextlib.suppress(ValueError):  # an interrupt came before it had started
            _selections().remove(weakref.ref(self))
        _all.discard(self)
        if not _all:
            _hook.remove()
        torch = sys.modules.get("torch")
        if was_current and torch is not None and torch.cuda.is_initialized():
            _select_current(torch)


_all: "weakref.WeakSet[TorchDeviceSelection]" = weakref.WeakSet()


def _selections() -> "list[weakref.ref[TorchDeviceSelection]]":
    selections: list[weakref.ref[TorchDeviceSelection]] = _thread.__dict__.setdefault("selections", [])
    return selections


def _current() -> TorchDeviceSelection | None:
    selections = _selections()
    while selections and selections[-1]() is None:
        selections.pop()
    return selections[-1]() if selections else None


def _select_current(torch: ModuleType) -> None:
    current = _current()
    if current is not None and torch.cuda.is_available():
        torch.cuda.init()  # before number() asks PyTorch how it numbers devices
        number = current.number()
        if number is not None:
            torch.cuda.set_device(number)


class _TorchImport(MetaPathFinder):
    """An import hook that lets the other finders find PyTorch, and selects the device after the import."""

    def install(self) -> None:
        with _lock:
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def remove(self) -> None:
        with _lock, contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_select(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # restores the loader
            execute(module)
            self.remove()
            _select_current(module)

        loader.exec_module = execute_and_select
        return spec


_hook = _TorchImport()
