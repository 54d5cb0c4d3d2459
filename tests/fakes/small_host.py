"""A daemon on a machine with little RAM: `GPUYARD_SIMULATE_HOST=1200MB python small_host.py`.

It is the simulated host, but what the real processes of its jobs hold is missing from its RAM. So tests can run short
of RAM without taking any from others. The lowest figure is left in `lowest-ram` in GPUYARD_HOME: the kernel's killer
would have acted at zero.
"""

import os
import sys
from pathlib import Path

from gpuyard.daemon.main import run_daemon
from gpuyard.engines.local.attempt_processes import RamMeter
from gpuyard.probes import local_machine
from gpuyard.probes.host import PsutilHost
from gpuyard.probes.simulated_devices import SimulatedHost

COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()))


class JobsRam:
    """The RAM that the jobs of a queue hold."""

    def __init__(self, home: Path, total_mb: float) -> None:
        self._meter = RamMeter(str(home))
        self._note = home / "lowest-ram"
        self._total_mb, self._most_mb = total_mb, 0.0

    def measure(self) -> float:
        held_mb = sum(self._meter.measure(0.0).values())
        if held_mb > self._most_mb:
            self._most_mb = held_mb
            self._note.write_text(f"{self._total_mb - held_mb:.0f}")
        return held_mb


if __name__ == "__main__":
    spec = os.environ["GPUYARD_SIMULATE_HOST"]
    jobs = JobsRam(Path(os.environ["GPUYARD_HOME"]), float(spec.removesuffix("MB")))
    vars(local_machine)["local_host"] = lambda: SimulatedHost(spec, PsutilHost(), jobs.measure)
    sys.exit(run_daemon())
