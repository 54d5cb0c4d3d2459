"""QueueParts: what the controller's step works with: the ports, the rules, and a part for each subject."""

from collections.abc import Callable

from gpuyard.model.lease import Holder
from gpuyard.ports import Clock, Engine, HostEngine, LeaseLedger, Suspender
from gpuyard.queue.adjust_leases import LeaseAdjuster
from gpuyard.queue.batch_gates import BatchGates
from gpuyard.queue.cluster_jobs import ClusterDispatch
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.engine_set import EngineSet
from gpuyard.queue.guard_host import HostGuard, ProgramsBeside
from gpuyard.queue.guard_memory import MemoryGuard
from gpuyard.queue.measure_energy import EnergyMeter
from gpuyard.queue.measure_usage import ProgressTracker, UsageTracker
from gpuyard.queue.own_leases import OwnLeases
from gpuyard.queue.start_pauses import DiskGate, StartPauses
from gpuyard.queue.suspend_jobs import SuspendControl
from gpuyard.queue.transitions import JobTransitions
from gpuyard.store.job_store import JobStore


class QueueParts:
    def __init__(  # noqa: PLR0913 - the ports
        self,
        store: JobStore,
        leases: LeaseLedger,
        engine: HostEngine,
        clock: Clock,
        *,
        rules: Rules,
        me: Holder,
        suspender: Suspender,
        open_engine: Callable[[str], Engine] | None = None,
    ) -> None:
        self.store, self.leases, self.clock, self.rules, self.me = store, leases, clock, rules, me
        self.closed: str | None = None  # why this daemon starts no more jobs
        self.transitions = transitions = JobTransitions(store)
        self.engines = EngineSet(engine, open_engine, from_wall=clock.from_wall)
        self.cluster_dispatch = ClusterDispatch(transitions, self.engines)
        self.suspend_control = SuspendControl(transitions, suspender)
        self.usage_tracker = UsageTracker(transitions, leases, me)
        self.energy_meter = EnergyMeter(transitions)
        self.progress_tracker = ProgressTracker(transitions)
        self.own_leases = OwnLeases(transitions, me)
        self.lease_adjuster = LeaseAdjuster(transitions, self.usage_tracker)
        self.memory_guard = MemoryGuard(transitions, self.suspend_control, leases, clock.from_wall)
        self.host_guard = HostGuard(transitions, ProgramsBeside(transitions, leases, clock.from_wall).read)
        self.batch_gates = BatchGates(transitions, clock.to_wall)
        self.disk_gate = DiskGate(transitions)
        self.start_pauses = StartPauses()
