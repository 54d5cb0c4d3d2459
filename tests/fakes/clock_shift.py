"""Step the wall clock of real processes, without touching the machine's clock (clock_shift.c).

    shift = ClockShift(tmp_path)
    environment = {**os.environ, **shift.environment}  # of the processes whose clock is to be stepped
    ...
    shift.step(86_400)   # a day forward, at once, in all of these processes
    shift.step(-86_400)  # and back
    shift.suspend(3600)  # as if the machine had slept for an hour: CLOCK_BOOTTIME goes on, too

Processes that inherit the environment (a daemon's keepers and jobs, too) share the shift. CLOCK_MONOTONIC and the times
of files are not shifted. A process whose environment lacks the variables is not affected.
"""

import os
import struct
from pathlib import Path

from tests.fakes.compile_library import compile_library

_SOURCE = Path(__file__).with_name("clock_shift.c")


def build_clock_shift(folder: Path) -> Path:
    """Compile `folder`/clock_shift.so, unless it is there."""
    library = folder / "clock_shift.so"
    if not library.exists():
        compile_library(_SOURCE, folder / f"clock_shift.{os.getpid()}.so").replace(library)
    return library


class ClockShift:
    """The clocks of the processes that have `environment`: `wall_s` and `boot_s` ahead of the machine's."""

    def __init__(self, folder: Path) -> None:
        self._library = build_clock_shift(folder)
        self._file = folder / "clock_shift"
        self._file.write_bytes(struct.pack("=qq", 0, 0))
        self.wall_s = self.boot_s = 0.0

    @property
    def environment(self) -> dict[str, str]:
        others = os.environ.get("LD_PRELOAD", "")
        return {"LD_PRELOAD": f"{self._library} {others}".strip(), "CLOCK_SHIFT": str(self._file)}

    def step(self, seconds: float) -> None:
        """Step the wall clock."""
        self.wall_s += seconds
        self._write()

    def suspend(self, seconds: float) -> None:
        """Let this time pass on the wall clock and on CLOCK_BOOTTIME alone."""
        self.boot_s += seconds
        self.step(seconds)

    def _write(self) -> None:
        with self._file.open("r+b", buffering=0) as file:  # in place: the processes have mapped this file
            file.write(struct.pack("=qq", round(self.wall_s * 1e9), round(self.boot_s * 1e9)))
