"""CUDA reads its variable when it is set up, and never again. Each thread has its own current device."""

import os
import threading
from types import SimpleNamespace
from typing import Any

_visible: list[str] = []
_current = threading.local()


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return bool(_visible)


def init() -> None:
    if not _visible:
        numbers = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        _visible.extend(f"SIM-{number}" for number in numbers)


def device_count() -> int:
    init()
    return len(_visible)


def get_device_properties(number: int) -> Any:
    init()
    return SimpleNamespace(uuid=_visible[number])


def set_device(number: int) -> None:
    init()
    assert 0 <= number < len(_visible), "invalid device ordinal"
    _current.number = number


def current_device() -> int:
    init()
    return getattr(_current, "number", 0)


def current_card() -> str:
    return _visible[current_device()]
