"""Compiles and controls the preloaded libraries: `inject.c`, which fails chosen calls of chosen processes, and
`tests/fakes/clock_shift.c`, which shifts the clocks of all of them."""

import mmap
import shutil
import struct
from enum import IntFlag
from pathlib import Path

from tests.fakes.clock_shift import ClockShift
from tests.fakes.compile_library import compile_library

_SOURCE = Path(__file__).with_name("inject.c")
_RULES = 8
_RULE = struct.Struct("=iIiI")


class Call(IntFlag):
    """Calls that can be made to fail: writes to files, fsync, and new processes and threads."""

    WRITE = 1
    SYNC = 2
    SPAWN = 4


class Injector:
    """The shared files that all processes with the preloaded libraries read at each call."""

    def __init__(self, folder: Path, library: Path) -> None:
        control = folder / "control"
        control.write_bytes(bytes(_RULES * _RULE.size))
        self.clock = ClockShift(folder)
        clock = self.clock.environment
        self.environment = {
            **clock,
            "LD_PRELOAD": f"{library} {clock['LD_PRELOAD']}",
            "TORTURE_CONTROL": str(control),
        }
        with control.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RULES * _RULE.size)

    def fail(self, pid: int, calls: Call, error: int, one_in: int = 1) -> None:
        """Let every `one_in`th of these calls of a process fail with this errno."""
        for at in range(0, _RULES * _RULE.size, _RULE.size):
            if not _RULE.unpack_from(self._map, at)[0]:
                # The pid last: a rule counts as soon as it is set.
                _RULE.pack_into(self._map, at, 0, calls, error, one_in)
                struct.pack_into("=i", self._map, at, pid)
                return

    def mend(self) -> None:
        for at in range(0, _RULES * _RULE.size, _RULE.size):
            struct.pack_into("=i", self._map, at, 0)


def build_injector(folder: Path) -> Injector | None:
    """Compile the libraries into the folder. Return None if there is no C compiler."""
    if shutil.which("cc") is None:
        return None
    return Injector(folder, compile_library(_SOURCE, folder / "inject.so", "-ldl"))
