"""Run the jobs of a trace through the real controller and store, on a simulated machine, by a policy.

A step follows every event: an arrival, an end, a change of memory, a time that the controller asked for. One step
covers all events within `quantum_s`."""

import math
import shlex
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from gpuyard import config
from gpuyard.errors import UserError
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import FixedMemory, Need, UnknownMemory, WholeDevice
from gpuyard.model.machine_snapshot import Device, Sample
from gpuyard.model.placeholders import ArrayElement
from gpuyard.model.submission import Submission
from gpuyard.policy.estimates import sureness_of
from gpuyard.policy.machine import Packing
from gpuyard.policy.world import SchedulingLimits
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.step import Controller, Step
from gpuyard.queue.user_requests import UserRequests
from gpuyard.simulator.schedule_metrics import SimulatedPass
from gpuyard.simulator.simulated_ports import ME, SimulatedEngine, SimulatedLedger, SimulatedSuspender
from gpuyard.simulator.traces import Sharing, TraceJob
from gpuyard.simulator.virtual_machine import LOAD_HALF_LIFE_S, VirtualMachine
from gpuyard.store.database import open_database
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries


class Policy(Struct, frozen=True, kw_only=True):
    """`need_of` returns the need of a job, given the size of the largest device."""

    name: str
    need_of: Callable[[TraceJob, float], Need]
    rules: Rules = Rules(limits=SchedulingLimits(cpu_jobs=1))

    @property
    def learns(self) -> bool:
        """Whether memory is learned from earlier runs."""
        return self.need_of is _learned


def _learned(job: TraceJob, _: float) -> Need:
    return Need(devices=job.gpus, memory=UnknownMemory() if job.gpus else WholeDevice())


def _as_declared(job: TraceJob, card_mb: float) -> Need:
    """Return the declared need, at most a whole device: users know how large the devices are."""
    memory = WholeDevice() if job.declared_mb is None else FixedMemory(min(card_mb, job.declared_mb))
    return Need(devices=job.gpus, memory=memory)


def _default_rules() -> Rules:
    """Return the rules of a daemon without a configuration file."""
    found = config.PackingConfig()
    packing = Packing(
        max_jobs_per_device=found.max_jobs_per_device,
        max_load_percent=found.max_load_percent or None,
        min_gain_percent=found.min_gain_percent,
    )
    limits = SchedulingLimits(cpu_jobs=1)
    return Rules(limits=limits, packing=packing, shares_first_runs=found.first_run == "share")


POLICIES = {
    "fifo": Policy(name="fifo", need_of=lambda job, _: Need(devices=job.gpus)),
    "declared": Policy(name="declared", need_of=_as_declared),
    "gpuyard": Policy(name="gpuyard", need_of=_learned, rules=_default_rules()),
}


def find_policy(text: str) -> Policy:
    name, *options = text.split(":")
    if name not in POLICIES:
        raise UserError(f"there is no policy '{name}'", hint=f"there are: {', '.join(POLICIES)}")
    return replace(POLICIES[name], name=text, rules=reduce(_apply_option, options, POLICIES[name].rules))


def _apply_option(rules: Rules, text: str) -> Rules:
    option, _, value = text.partition("=")
    if option not in ("load", "jobs", "quantile", "gain"):
        raise UserError(
            f"'{text}' is not an option of a policy", hint="options: load, jobs, quantile, gain, as in load=100"
        )
    if value != "none" and not value.replace(".", "", 1).isdecimal():
        raise UserError(f"'{text}' needs a number of 0 or more, or none", hint="as in load=100 or load=none")
    number = None if value == "none" else float(value)
    if option == "load":
        return replace(rules, packing=replace(rules.packing, max_load_percent=number))
    if option == "quantile":
        if number is not None and not 0.5 <= number < 1.0:
            raise UserError(f"'{text}' is not a quantile", hint="a number from 0.5 up to 0.999, or none")
        sureness = rules.packing.sureness if number is None else sureness_of(number)
        return replace(rules, shares_first_runs=number is not None, packing=replace(rules.packing, sureness=sureness))
    if option == "gain":
        return replace(rules, packing=replace(rules.packing, min_gain_percent=number))
    most = None if number is None else max(1, int(number))
    return replace(rules, packing=replace(rules.packing, max_jobs_per_device=most))


_SAMPLE_EVERY_S = 1.0

Arrival = tuple[int, TraceJob]


class Simulation:
    """A machine, a controller and a store. What they learn in one pass is known in the next."""

    def __init__(self, devices: Sequence[Device], sharing: Sharing, policy: Policy, quantum_s: float = 0.0) -> None:
        self.machine = VirtualMachine(devices, sharing)
        self._sizes_mb = tuple(card.total_mb for card in self.machine.cards)
        self._policy, self._quantum_s = policy, quantum_s
        self._database = open_database(None)[0]
        ledger = SimulatedLedger(self.machine)
        self._engine = SimulatedEngine(self.machine, ledger)
        store, clock = JobStore(self._database), self.machine.clock
        suspender = SimulatedSuspender(self.machine, self._engine)
        self._controller = Controller(
            store, ledger, self._engine, clock, rules=policy.rules, me=ME, suspender=suspender
        )
        self._requests = UserRequests(self._controller, store, QueueQueries(self._database, store), clock)
        self._evidence_due: dict[int, float] = {}  # as of the last step
        self._controller.recover()

    def close(self) -> None:
        self._database.close()

    def play(self, jobs: Sequence[TraceJob], progress: Callable[[int], None] = lambda _: None) -> SimulatedPass:
        """Run all jobs from arrival to end. `progress` gets the number of jobs that have ended."""
        transitions, machine = self._controller.transitions, self.machine
        started, before = machine.now, self._integrals()
        goal = transitions.finished + sum(not job.is_foreign for job in jobs)
        waiting = list(enumerate(jobs))[::-1]
        steps = idle = 0
        # After 100 steps without a start and without time passing, nothing will change any more.
        while transitions.finished < goal and idle < 100:
            arrived = []
            while waiting and started + waiting[-1][1].at_s <= machine.now:
                arrived.append(waiting.pop())
            self._admit(arrived)
            at, step = machine.now, self._step()
            steps += 1
            progress(len(jobs) - goal + transitions.finished)
            arrival = started + waiting[-1][1].at_s if waiting else None
            times = (machine.next_event(), arrival, step.wake_at, self._next_sample(step))
            following = min((time for time in times if time is not None), default=None)
            if following is None:
                break  # no event will come: the jobs that still wait are lost
            machine.advance(max(following, at) + self._quantum_s)
            idle = idle + 1 if machine.now == at and not step.started else 0
        memory_mb_s, compute_s = (after - earlier for after, earlier in zip(self._integrals(), before, strict=True))
        over, self._engine.over = self._engine.over, []
        runs = [replace(run, started_s=run.started_s - started, ended_s=run.ended_s - started) for run in over]
        return SimulatedPass(
            jobs=jobs, runs=runs, devices_mb=self._sizes_mb, memory_mb_s=memory_mb_s, compute_s=compute_s, steps=steps
        )

    def _step(self) -> Step:
        machine, now = self.machine, self.machine.now
        self._engine.update_measurements()
        due = [job_id for job_id, at in self._evidence_due.items() if at <= now]
        machine.read_again(self._engine.devices_of(due))
        return self._controller.step(Sample(snapshot=machine.snapshot(), cpu_percent=0.0, loads=machine.loads()))

    def _next_sample(self, step: Step) -> float | None:
        """Return when a sample may show something new. (The daemon takes one every second.)"""
        now = self.machine.now
        times = []
        self._evidence_due = self._controller.lease_adjuster.evidence_due()
        evidence_at = min(self._evidence_due.values(), default=math.inf)
        if evidence_at < math.inf:
            seconds = _SAMPLE_EVERY_S * max(1, math.ceil((evidence_at - now) / _SAMPLE_EVERY_S))
            times.append(now + seconds + 0.001)  # a sample that is a rounding error too early would see no change
        if self.machine.changed or self._controller.memory_guard.closed():
            times.append(now + _SAMPLE_EVERY_S)
        if step.waits_for_sample and self.machine.unsteady:
            times.append(now + LOAD_HALF_LIFE_S)
        return min(times, default=None)

    def _integrals(self) -> tuple[float, float]:
        cards = self.machine.cards
        for card in cards:
            card.change(self.machine.now)
        return sum(card.memory_mb_s for card in cards), sum(card.compute_s for card in cards)

    def _admit(self, arrivals: list[Arrival]) -> None:
        """Start foreign processes, and submit jobs of a kind that arrive together as one submission."""
        for job in (job for _, job in arrivals if job.is_foreign):
            # On the device with the most free memory.
            free_mb = [card.total_mb - card.used_mb for card in self.machine.cards]
            self.machine.start(self.machine.make(job, -1, (free_mb.index(max(free_mb)),)))
        ours = [arrival for arrival in arrivals if not arrival[1].is_foreign]
        for _, group in groupby(sorted(ours, key=_kind), key=_kind):
            alike = list(group)
            job = alike[0][1]
            need = self._policy.need_of(job, max(self._sizes_mb))
            command = tuple(shlex.split(job.program))
            spec = JobSpec(command=command, cwd="/", environment={}, need=need, preempts=bool(job.urgent))
            elements = [ArrayElement()] * len(alike)
            submission = Submission(token="", spec=spec, priority=job.priority, count=len(alike), elements=elements)
            request = self._requests.submit(submission, ME.user)
            try:
                while True:
                    next(request)
            except StopIteration as stop:
                first, _ = stop.value
            self._engine.jobs.update(enumerate(alike, first))


def _kind(arrival: Arrival) -> tuple[str, int, int, float, bool]:
    job = arrival[1]
    return job.program, job.priority, job.gpus, job.declared_mb or 0.0, bool(job.urgent)
