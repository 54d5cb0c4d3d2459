"""Read the whole machine: all vendors' chains in parallel, and the host, within one deadline."""

from collections.abc import Callable, Sequence

from gpuyard.core.snapshot import Device, Host, Problem, Reading, Snapshot
from gpuyard.ports import Clock, HostProbe
from gpuyard.probes.common.complete_memory import complete_memory
from gpuyard.probes.common.deadline import Deadline
from gpuyard.probes.common.worker_thread import NoAnswerYet, WorkerThread
from gpuyard.probes.fallback_chain import FallbackChain

# The rest of the deadline is for killing tools and their children.
_CHAIN_SHARE = 0.85


class MachineReader:
    """Takes snapshots. Not thread-safe."""

    def __init__(self, chains: Sequence[FallbackChain], host: HostProbe, clock: Clock, deadline_s: float) -> None:
        self._chains = [(chain, WorkerThread[Reading](f"gpuyard-{chain.vendor}")) for chain in chains]
        self._host = host
        self._clock = clock
        self._deadline_s = deadline_s

    def snapshot(self) -> Snapshot:
        deadline = Deadline(self._deadline_s)
        taken_at = self._clock.now()
        finishing = [self._start(chain, worker, deadline) for chain, worker in self._chains]
        host = self._host.read()
        return assemble(taken_at, host, [finish() for finish in finishing])

    def _start(self, chain: FallbackChain, worker: WorkerThread[Reading], deadline: Deadline) -> Callable[[], Reading]:
        if chain.is_resting():
            last_known = chain.last_known()
            return lambda: last_known
        if not worker.start(lambda: chain.read(self._deadline_s * _CHAIN_SHARE)):
            return chain.overdue
        return lambda: self._finish(chain, worker, deadline)

    def _finish(self, chain: FallbackChain, worker: WorkerThread[Reading], deadline: Deadline) -> Reading:
        try:
            return worker.finish(deadline.left())
        except NoAnswerYet:
            return chain.overdue()


def assemble(taken_at: float | None, host: Host, readings: Sequence[Reading]) -> Snapshot:
    """Return one snapshot of several readings, with a problem for each unhealthy device."""
    devices = tuple(complete_memory(device, host) for reading in readings for device in reading.devices)
    problems = tuple(problem for reading in readings for problem in reading.problems)
    return Snapshot(
        taken_at=taken_at,
        host=host,
        devices=devices,
        problems=(*problems, *(_health_problem(device) for device in devices if not device.healthy)),
    )


def _health_problem(device: Device) -> Problem:
    return Problem(
        source=device.id,
        kind="unhealthy",
        message=f"{device.name}: {device.fault}" if device.name else str(device.fault),
        hint="no work is placed on it; see dmesg",
        vendor=device.vendor,
    )
