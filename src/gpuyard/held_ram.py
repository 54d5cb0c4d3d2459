"""Measure the RAM of a program that runs beside the queue, and warn if it holds more than it declared.

The rules are in `core/memory/declared_ram.py`. `gpuyard run` measures its program every 2 s. A script with `ram=` is
measured when it releases its lease: a thread of ours in it would disturb programs that fork.
"""

import os
import time
from collections.abc import Callable

from gpuyard.config import load_config
from gpuyard.core.memory.declared_ram import HeldRam, RamWarnings, judge_held_ram, ram_figures
from gpuyard.leases.host_usage import HostMeter
from gpuyard.probes.local_machine import local_host
from gpuyard.probes.machine_reader import HostProbe

_EVERY_S = 2.0
# `gpuyard run` and its two helpers, which are copies of it.
_OWN_PROCESSES = 3


class ProgramRamWatch:
    """The program of a `gpuyard run`. `write` gets the warnings."""

    def __init__(self, name: str, declared_mb: float | None, write: Callable[[str], None]) -> None:
        self._name, self._declared_mb, self._write = name, declared_mb, write
        self._host: HostProbe | None = None
        self._said = RamWarnings()
        self._measured_at = time.monotonic()

    def measure_if_due(self) -> None:
        """Measure the program if 2 s have passed since the last time, and write a warning if one is due."""
        if time.monotonic() < self._measured_at + _EVERY_S:
            return
        self._measured_at = time.monotonic()
        self._host = self._host or local_host()  # not before: its first reading takes 0.1 s, and many programs end soon
        tree_mb, own_mb = HostMeter().tree_mb(os.getpid())
        if tree_mb is None or own_mb is None:
            return
        held = HeldRam(
            name=self._name,
            held_mb=max(0.0, tree_mb - _OWN_PROCESSES * own_mb),
            declared_mb=self._declared_mb,
            option="--ram",
            figures=ram_figures(self._host.read(), load_config().host.keep_free_mb),
        )
        self._said, line = judge_held_ram(self._said, held)
        if line is not None:
            self._write(f"gpuyard: {line}")


def warn_about_own_ram(name: str, declared_mb: float, write: Callable[[str], None]) -> None:
    """Write a warning if this process and its descendants hold more RAM than it declared with `ram=`."""
    held_mb = HostMeter().tree_mb(os.getpid())[0]
    if held_mb is not None:
        held = HeldRam(name=name, held_mb=held_mb, declared_mb=declared_mb, option="ram=")
        line = judge_held_ram(RamWarnings(), held)[1]
        if line is not None:
            write(f"gpuyard: {line}")
