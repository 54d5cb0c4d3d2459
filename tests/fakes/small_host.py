"""A daemon on a machine with little RAM: `GPUYARD_TEST_RAM_MB=1200 python small_host.py`.

Only the host's figures are simulated: what the real processes of its jobs hold is missing from the RAM of the machine.
So tests can run short of RAM without taking any from others. The lowest figure is left in `lowest-ram` in
GPUYARD_HOME: the kernel's killer would have acted at zero.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gpuyard.daemon.main import run_daemon
from gpuyard.engines.local.process_tree import RamMeter
from gpuyard.probes import host

COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()))
_MB = 1 << 20


class SmallHost:
    def __init__(self, home: Path, total_mb: float) -> None:
        self._meter = RamMeter(str(home))
        self._note = home / "lowest-ram"
        self._total_mb = self._lowest_mb = total_mb

    def memory(self, _limits: Sequence[object]) -> tuple[float, float, bool]:
        held_mb = sum(self._meter.measure(0.0).values())
        available_mb = self._total_mb - held_mb
        if available_mb < self._lowest_mb:
            self._lowest_mb = available_mb
            self._note.write_text(f"{available_mb:.0f}")
        return self._total_mb * _MB, max(0.0, available_mb) * _MB, False


if __name__ == "__main__":
    small = SmallHost(Path(os.environ["GPUYARD_HOME"]), float(os.environ["GPUYARD_TEST_RAM_MB"]))
    vars(host)["_memory"] = small.memory  # the one place where the size of the machine is known
    sys.exit(run_daemon())
