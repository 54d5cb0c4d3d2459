"""A stand-in for PyTorch with one card, for machines that have neither. It is numpy, and what `residency.cuda` calls.

What a program must not rely on does not work here either:
- Work that is queued on a stream runs when a caller waits for it and not before; streams are independent.
- Memory without a reference is overwritten, even if work on it is still queued.
- Memory is mapped in steps of 20 MB, and the cap is looked at before the rounding, as with expandable segments.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent


_MODULES = ("torch", "torch.cuda", "torch.tensors", "torch.version")


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`import torch` gives the stand-in, new, until the test ends."""
    for name in {*_MODULES, *(name for name in sys.modules if name.partition(".")[0] == "torch")}:
        monkeypatch.setitem(sys.modules, name, None)  # so that what is imported now is gone afterwards
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(FOLDER))
    import torch

    return torch
