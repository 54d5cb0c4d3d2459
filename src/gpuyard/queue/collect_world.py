"""Computes the world that a plan is decided by, from the parts of the controller, and has it decided: the first jobs of
each lane with what is known of their kind, running jobs, devices and leases.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from msgspec.structs import replace

from gpuyard.model.lease import Need
from gpuyard.model.machine_snapshot import Sample
from gpuyard.policy.device_health import closed_devices
from gpuyard.policy.host_room import grantable_mb
from gpuyard.policy.machine import Machine
from gpuyard.policy.numbers import LOOK_AHEAD
from gpuyard.policy.plan import decide
from gpuyard.policy.queue_order import Candidate, Lane, LaneQueue, most_urgent
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from gpuyard.policy.world import JobFacts, Plan, WaitingLane, World
from gpuyard.queue.configured_rules import HostGates
from gpuyard.queue.host_usage import HostUsage
from gpuyard.queue.own_leases import LedgerState
from gpuyard.queue.running_jobs import lease_loads, packing_now, power_limit, running_jobs
from gpuyard.queue.step_parts import QueueParts

# The first world has this many jobs of each lane. A lane that runs dry is given this many times as many.
_FIRST_JOBS, _MORE = 2, 8


class PlannerInput:
    def __init__(self, parts: QueueParts, host_usage: HostUsage) -> None:
        self._parts = parts
        self._host_usage = host_usage
        self._host_gates = HostGates()
        self._portions: Mapping[int, int] = {}  # how many jobs of a lane the last plan that ran dry was given
        self._need_of: Callable[[int], Need] | None = None  # as of the last world

    def decide(
        self,
        sample: Sample,
        now: float,
        queues: Sequence[LaneQueue],
        ledger: LedgerState | None,
        explained_lane: int | None = None,
    ) -> tuple[World, Plan]:
        """Return the plan, and the world that it follows from. Without `ledger` (it was not read) no process counts as
        foreign."""
        world, lanes = self._world(sample, now, queues, ledger, explained_lane)
        while (plan := decide(world, explained_lane=explained_lane)).dry:
            lanes.read_more(plan.dry)
            self._portions = lanes.portions()
            world = replace(world, lanes=lanes.waiting(), facts=lanes.facts)
        return world, plan

    def _world(
        self,
        sample: Sample,
        now: float,
        queues: Sequence[LaneQueue],
        ledger: LedgerState | None,
        explained_lane: int | None,
    ) -> tuple[World, "_Lanes"]:
        parts, (leases, tickets) = self._parts, ledger or ((), ())
        my_ticket = parts.leases.my_ticket()
        tickets = tuple(replace(each, since=parts.clock.from_wall(each.since)) for each in tickets)
        rules, snapshot, transitions = parts.rules, sample.snapshot, parts.transitions
        foreign_limit = rules.packing.max_foreign_load_percent
        banned = rules.devices.banned_ids(snapshot)
        devices = [each for each in snapshot.usable_devices() if each.id not in banned] or snapshot.usable_devices()
        most_ram_mb = grantable_mb(snapshot.host, rules.host.limits)
        running = running_jobs(transitions)
        if any(queue.lane.preempts for queue in queues):
            running = tuple(parts.suspend_control.with_costs(running, sample, rules, now))
        used = transitions.used(now) if len({queue.lane.party for queue in queues}) > 1 else {}

        def need_of(job_id: int) -> Need:
            return transitions.estimates.need(
                job_id, devices, rules.first_runs, lambda job: parts.lease_adjuster.running_like(job, now), most_ram_mb
            )

        self._need_of = need_of
        first = most_urgent(queues, used, now, explained_lane)
        lanes = _Lanes(first, parts, need_of, self._portions)
        world = World(
            now=now,
            machine=Machine(
                now=now,
                snapshot=snapshot,
                leases=leases,
                measured=parts.leases.measure(snapshot, leases),
                loads=sample.loads,
                lease_loads=lease_loads(transitions, now),
                foreign=parts.leases.foreign_loads(snapshot, leases, now, foreign_limit) if ledger else {},
                packing=packing_now(transitions, rules.packing, queues, len(devices)),
                host=self._host_usage.view(leases, sample, rules),
                closed={
                    **parts.memory_guard.closed(),
                    **closed_devices(snapshot, parts.leases.drains(), banned, parts.leases.health_marks()),
                },
            ),
            lanes=lanes.waiting(),
            facts=lanes.facts,
            holder=parts.me,
            limits=rules.limits,
            running=running,
            used=used,
            closed_reasons=(
                *self.paused(),
                *self._host_gates.closed_reasons(sample, rules),
                *parts.host_guard.closed_reasons(),
            ),
            start_caps=tuple(parts.start_pauses.start_caps(now)),
            tickets=tuple(ticket for ticket in tickets if ticket.id != my_ticket),
            my_ticket=next((ticket for ticket in tickets if ticket.id == my_ticket), None),
            power=power_limit(rules.max_gpu_power_w, transitions),
            pace_states=parts.batch_gates.pace_states,
            stopped_tags=parts.transitions.store.stopped_tags(),
            last_starts=transitions.staggered_starts.of_tags(queue.lane for queue in queues),
            array_starts=transitions.staggered_starts.of_arrays(queue.lane for queue in queues),
        )
        return world, lanes

    def need_of(self, job_id: int) -> Need:
        """Return the need of a job in a lane that sizes each, as of the last world."""
        assert self._need_of is not None
        return self._need_of(job_id)

    def paused(self) -> Iterator[Reason]:
        """Yield why no job starts, as people decided or the disk demands."""
        if self._parts.closed is not None:
            yield Reason(ReasonKind.PAUSED, self._parts.closed)
        if self._parts.transitions.store.setting("paused"):
            yield Reason(ReasonKind.PAUSED, "the queue is paused: `gpuyard unpause` lets it go on")
        yield from self._parts.disk_gate.closed_reasons(self._parts.rules.min_free_disk_mb)


class _Lanes:
    """The first jobs of each lane, as far as they have been read, and what is known of them."""

    def __init__(
        self,
        first: Sequence[tuple[LaneQueue, Candidate]],
        parts: QueueParts,
        need_of: Callable[[int], Need],
        portions: Mapping[int, int],
    ) -> None:
        self.facts: dict[int, JobFacts] = {}
        self._estimates, self._rules = parts.transitions.estimates, parts.rules
        self._disk_gate = parts.disk_gate
        self._need_of = need_of
        self._queues = {queue.lane.id: queue for queue, _ in first}
        self._jobs = {queue.lane.id: [self._known(queue.lane, job)] for queue, job in first}
        self._ended: set[int] = set()
        for lane_id in self._queues:
            self._read(lane_id, portions.get(lane_id, _FIRST_JOBS))

    def read_more(self, lane_ids: frozenset[int]) -> None:
        for lane_id in lane_ids:
            self._read(lane_id, _MORE * len(self._jobs[lane_id]))

    def portions(self) -> dict[int, int]:
        """Return how many jobs have been read of each lane of which there are more: the next plan begins with these."""
        known = ((lane_id, len(jobs)) for lane_id, jobs in self._jobs.items() if lane_id not in self._ended)
        return {lane_id: min(count, LOOK_AHEAD + 1) for lane_id, count in known}

    def waiting(self) -> tuple[WaitingLane, ...]:
        return tuple(
            WaitingLane(lane=queue.lane, jobs=tuple(self._jobs[lane_id]), has_more=lane_id not in self._ended)
            for lane_id, queue in self._queues.items()
        )

    def _read(self, lane_id: int, count: int) -> None:
        queue, jobs = self._queues[lane_id], self._jobs[lane_id]
        jobs += [self._known(queue.lane, job) for job in islice(queue.jobs, count - len(jobs))]
        if len(jobs) < count:
            self._ended.add(lane_id)

    def _known(self, lane: Lane, job: Candidate) -> Candidate:
        kind = None
        if lane.sizes_each or lane.need.devices or lane.need.host is not None:
            kind = self._estimates.kind_of(job.job_id)
            self._note_kind(lane, kind, job.job_id)
        full: tuple[Reason, ...] = ()
        if lane.writes_files and not lane.resumes:
            full = self._disk_gate.job_reasons(job.job_id, self._rules.min_free_disk_mb)
        return job if kind is None and not full else replace(job, kind=kind, full_disks=full)

    def _note_kind(self, lane: Lane, kind: int, job_id: int) -> None:
        found = self.facts.get(kind)
        if found is None:
            has_power_limit = self._rules.max_gpu_power_w is not None
            power_w = self._estimates.power_w(self._estimates.job(job_id)) if has_power_limit else None
            found = self.facts[kind] = JobFacts(estimate=self._estimates.estimate_of(job_id), power_w=power_w)
        if lane.sizes_each and found.need is None:
            self.facts[kind] = replace(found, need=self._need_of(job_id))
