"""Tells the loop when a lease or ticket of another process ends, while a job waits for one."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from gpuyard.leases.file_watch import FileWatch


class LedgerWatch:
    def __init__(self, folder: Path, on_change: Callable[[], None]) -> None:
        self._folder = folder
        self._tell = on_change
        self._watch: FileWatch | None = None

    def set(self, *, is_wanted: bool) -> None:
        if is_wanted == (self._watch is not None):
            return
        loop = asyncio.get_running_loop()
        if self._watch is not None:
            loop.remove_reader(self._watch.fileno())
            self._watch.give_back()
            self._watch = None
            return
        watch = FileWatch(self._folder)
        if watch.fileno() < 0:
            watch.give_back()
            return
        self._watch = watch
        loop.add_reader(watch.fileno(), self._on_change)

    def _on_change(self) -> None:
        if self._watch is not None:
            self._watch.clear()
        self._tell()
