"""PlannerInput: what the planner decides by, collected from the parts of the controller."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpuyard.control.host_usage import HostUsage
from gpuyard.control.ledger_ticket import LedgerState
from gpuyard.control.power_draws import power_limit
from gpuyard.control.rules import HostGates
from gpuyard.control.sharing_facts import lease_loads, packing_now
from gpuyard.core.scheduling.closed_devices import closed_devices
from gpuyard.core.scheduling.host_capacity import grantable_mb
from gpuyard.core.scheduling.placement import PlacementView
from gpuyard.core.scheduling.plan import PlannerView
from gpuyard.core.scheduling.queue_order import LaneQueue
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.snapshot import Sample
from gpuyard.ports import Clock, LeaseLedger

if TYPE_CHECKING:
    from gpuyard.control.controller import Controller


class PlannerInput:
    def __init__(self, controller: "Controller", leases: LeaseLedger, clock: Clock, host_usage: HostUsage) -> None:
        self._controller = controller
        self._leases = leases
        self._clock = clock
        self._host_usage = host_usage
        self._host_gates = HostGates()

    def view(self, sample: Sample, now: float, queues: Sequence[LaneQueue], ledger: LedgerState | None) -> PlannerView:
        """Collect the planner's input. Without `ledger` (it was not read) no process counts as foreign."""
        parts, (leases, tickets) = self._controller, ledger or ((), ())
        my_ticket = self._leases.my_ticket()
        tickets = tuple(replace(each, since=self._clock.from_wall(each.since)) for each in tickets)
        rules, snapshot, transitions = parts.rules, sample.snapshot, parts.transitions
        foreign_limit = rules.packing.max_foreign_load_percent
        banned = rules.devices.banned_ids(snapshot)
        devices = [each for each in snapshot.usable_devices() if each.id not in banned] or snapshot.usable_devices()
        running = parts.running_jobs.list()
        most_ram_mb = grantable_mb(snapshot.host, rules.host.limits)
        if any(queue.lane.preempts for queue in queues):
            running = list(parts.suspend_control.with_costs(running, sample, rules, now))
        return PlannerView(
            now=now,
            placement=PlacementView(
                now=now,
                snapshot=snapshot,
                leases=leases,
                measured=self._leases.measure(snapshot, leases),
                loads=sample.loads,
                lease_loads=lease_loads(transitions, now),
                foreign=self._leases.foreign_loads(snapshot, leases, now, foreign_limit) if ledger else {},
                packing=packing_now(transitions, rules.packing, queues, len(devices)),
                host=self._host_usage.view(leases, sample, rules),
                closed={
                    **parts.memory_guard.closed(),
                    **closed_devices(snapshot, self._leases.drains(), banned, self._leases.health_marks()),
                },
            ),
            queues=queues,
            holder=parts.me,
            limits=rules.limits,
            running=running,
            used=transitions.used(now) if len({queue.lane.party for queue in queues}) > 1 else {},
            closed_reasons=(
                *self.paused(),
                *self._host_gates.closed_reasons(sample, rules),
                *parts.host_guard.closed_reasons(),
            ),
            start_caps=tuple(parts.start_pauses.start_caps(now)),
            tickets=tuple(ticket for ticket in tickets if ticket.id != my_ticket),
            my_ticket=next((ticket for ticket in tickets if ticket.id == my_ticket), None),
            estimate=transitions.estimates.estimate_of,
            ends_after=parts.running_jobs.ends_after,
            ends_about=parts.running_jobs.ends_about,
            kind=transitions.estimates.kind_of,
            disk_refusals=lambda job_id: parts.disk_gate.job_reasons(job_id, rules.min_free_disk_mb),
            power=power_limit(rules.max_gpu_power_w, transitions),
            pace_states=parts.batch_gates.pace_states,
            stopped_tags=parts.transitions.store.stopped_tags(),
            last_starts=transitions.staggered_starts.of_tags(queue.lane for queue in queues),
            array_starts=transitions.staggered_starts.of_arrays(queue.lane for queue in queues),
            need=lambda _, job_id: transitions.estimates.need(
                job_id,
                devices,
                rules.first_runs,
                lambda job: parts.lease_adjuster.running_like(job, now),
                most_ram_mb,
            ),
        )

    def paused(self) -> Iterator[Reason]:
        """Yield why no job starts, as people decided or the disk demands."""
        if self._controller.closed is not None:
            yield Reason(ReasonKind.PAUSED, self._controller.closed)
        if self._controller.transitions.store.setting("paused"):
            yield Reason(ReasonKind.PAUSED, "the queue is paused: `gpuyard unpause` lets it go on")
        yield from self._controller.disk_gate.closed_reasons(self._controller.rules.min_free_disk_mb)
