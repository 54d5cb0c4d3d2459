"""QueueParts: what the controller's step works with: the ports, the rules, and a part for each subject."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from gpuyard.model.lease import Holder
from gpuyard.ports import Clock, Engine, HostEngine, LeaseLedger, Suspender
from gpuyard.queue.batch_gates import BatchGates
from gpuyard.queue.cluster_jobs import ClusterDispatch
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.engine_set import EngineSet
from gpuyard.queue.guard_memory import HostGuard, MemoryGuard, ProgramsBeside
from gpuyard.queue.measure_usage import EnergyMeter, ProgressTracker, UsageTracker
from gpuyard.queue.own_leases import LeaseAdjuster, OwnLeases
from gpuyard.queue.start_pauses import DiskGate, StartPauses
from gpuyard.queue.suspend_jobs import SuspendControl
from gpuyard.queue.transitions import JobTransitions
from gpuyard.store.job_store import JobStore


@dataclass(eq=False)
class QueueParts:
    store: JobStore
    leases: LeaseLedger
    engine: HostEngine
    clock: Clock
    _: KW_ONLY
    rules: Rules
    me: Holder
    suspender: Suspender
    open_engine: Callable[[str], Engine] | None = None

    def __post_init__(self) -> None:
        from_wall = self.clock.from_wall
        self.closed: str | None = None  # why this daemon starts no more jobs
        self.transitions = transitions = JobTransitions(self.store)
        self.engines = EngineSet(self.engine, self.open_engine, from_wall=from_wall)
        self.cluster_dispatch = ClusterDispatch(transitions, self.engines)
        self.suspend_control = SuspendControl(transitions, self.suspender)
        self.usage_tracker = UsageTracker(transitions, self.leases, self.me)
        self.energy_meter = EnergyMeter(transitions)
        self.progress_tracker = ProgressTracker(transitions)
        self.own_leases = OwnLeases(transitions, self.me)
        self.lease_adjuster = LeaseAdjuster(transitions, self.usage_tracker)
        self.memory_guard = MemoryGuard(transitions, self.suspend_control, self.leases, from_wall)
        self.host_guard = HostGuard(transitions, ProgramsBeside(transitions, self.leases, from_wall).read)
        self.batch_gates = BatchGates(transitions, self.clock.to_wall)
        self.disk_gate = DiskGate(transitions)
        self.start_pauses = StartPauses()
