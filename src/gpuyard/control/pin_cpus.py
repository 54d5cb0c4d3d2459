"""Gives each attempt its CPUs where `[host] pin_cpus` is set. The rules are in `core/scheduling/cpu_sets.py`.

What each attempt has is recorded with it, so that a daemon that takes over gives no CPU to a second job.
"""

from collections.abc import Callable, Sequence

from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Job
from gpuyard.core.scheduling.cpu_sets import CpuLayout, choose_cpus, owned_cpus
from gpuyard.core.snapshot import Device
from gpuyard.probes.cpu_layout import node_of, read_cpu_layout


class CpuPinning:
    def __init__(
        self,
        transitions: JobTransitions,
        read_layout: Callable[[], CpuLayout] = read_cpu_layout,
        node: Callable[[Device], int | None] = node_of,
    ) -> None:
        self._transitions = transitions
        self._read_layout = read_layout
        self._node = node

    def cpus_for(self, job: Job, devices: Sequence[Device]) -> tuple[int, ...]:
        """Return the CPUs of the job's next attempt on these devices; empty: it may run on any."""
        live = (each for each in self._transitions.live.values() if not each.attempt.engine)
        taken = owned_cpus((each.job.spec.cpus, each.attempt.cpus) for each in live)
        return choose_cpus(job.spec.cpus, self._read_layout(), taken, {self._node(device) for device in devices})
