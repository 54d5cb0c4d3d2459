"""QueueParts: what the controller's step works with: the ports, the rules, and a part for each subject."""

from collections.abc import Callable

from gpuyard.control.adjust_leases import LeaseAdjuster
from gpuyard.control.batch_gates import BatchGates
from gpuyard.control.cluster_dispatch import ClusterDispatch
from gpuyard.control.disk_gate import DiskGate
from gpuyard.control.engine_set import EngineSet
from gpuyard.control.guard_host import HostGuard
from gpuyard.control.guard_memory import MemoryGuard
from gpuyard.control.own_leases import OwnLeases
from gpuyard.control.programs_beside import ProgramsBeside
from gpuyard.control.rules import Rules
from gpuyard.control.start_pauses import StartPauses
from gpuyard.control.suspend_jobs import SuspendControl
from gpuyard.control.track_energy import EnergyMeter
from gpuyard.control.track_progress import ProgressTracker
from gpuyard.control.track_usage import UsageTracker
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.lease import Holder
from gpuyard.ports import Clock, Engine, HostEngine, LeaseLedger, Suspender
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
