"""A simulation: jobs of a trace are submitted to the real controller and store, which start them in a simulated world.

A step follows whatever happens: an arrival, an end, a change of memory, a time that the controller asked for. What
happens within a quantum is seen to by one step.
"""

import heapq
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

from gpuyard.control.controller import Controller
from gpuyard.control.step import Step
from gpuyard.control.user_requests import InPieces, UserRequests
from gpuyard.core.job.job import JobSpec, OutcomeKind
from gpuyard.core.job.submission import ArrayElement, Submission
from gpuyard.core.sample import Sample
from gpuyard.core.snapshot import Device
from gpuyard.simulator.machine_parts import LOAD_HALF_LIFE_S, SimulatedProgram
from gpuyard.simulator.policies import Policy
from gpuyard.simulator.schedule_metrics import SimulatedPass, SimulatedRun
from gpuyard.simulator.sharing_slowdown import Sharing
from gpuyard.simulator.simulated_ports import ME, SimulatedEngine, SimulatedLedger, SimulatedSuspender
from gpuyard.simulator.trace_file import TraceJob
from gpuyard.simulator.virtual_machine import VirtualMachine
from gpuyard.store.database import open_database
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries

# So many steps in a row that change nothing, and no time has passed: it stands still.
_MOST_IDLE_STEPS = 100
_FOREIGN = -1
# Times are sums of others, and a look that comes a rounding error too early sees nothing.
_MOMENT_S = 0.001
_LOOK_EVERY_S = 1.0

T = TypeVar("T")
Arrival = tuple[int, TraceJob]


class Simulation:
    """What was learned in one pass is known in the next."""

    def __init__(self, devices: Sequence[Device], sharing: Sharing, policy: Policy, quantum_s: float = 0.0) -> None:
        self.world = VirtualMachine(devices, sharing)
        self._sizes_mb = tuple(card.total_mb for card in self.world.cards)
        self._policy = policy
        self._quantum_s = quantum_s
        self._database = open_database(None)[0]
        book = SimulatedLedger(self.world)
        self._engine = SimulatedEngine(self.world, book)
        self._looks: list[float] = []
        store, clock = JobStore(self._database), self.world.clock
        suspender = SimulatedSuspender(self.world, self._engine)
        self._controller = Controller(store, book, self._engine, clock, rules=policy.rules, me=ME, suspender=suspender)
        self._requests = UserRequests(self._controller, store, QueueQueries(self._database, store), clock)
        self._controller.recover()

    def close(self) -> None:
        self._database.close()

    def play(self, jobs: Sequence[TraceJob], progress: Callable[[int], None] = lambda _: None) -> SimulatedPass:
        """One pass: all jobs from their arrival to their end; `progress` is told how many have ended."""
        began, before = self.world.now, self._integrals()
        steps = self._run(jobs, began, progress)
        memory_mb_s, compute_s = (after - earlier for after, earlier in zip(self._integrals(), before, strict=True))
        runs = [_run(*over, began) for over in self._engine.over if over[0].number != _FOREIGN]
        self._engine.over.clear()
        return SimulatedPass(
            jobs=jobs,
            runs=runs,
            devices_mb=self._sizes_mb,
            memory_mb_s=memory_mb_s,
            compute_s=compute_s,
            steps=steps,
        )

    def _run(self, jobs: Sequence[TraceJob], began: float, progress: Callable[[int], None]) -> int:
        """In so many steps."""
        transitions, world = self._controller.transitions, self.world
        goal = transitions.finished + sum(not job.is_foreign for job in jobs)
        waiting = list(enumerate(jobs))[::-1]
        steps = idle = 0
        while transitions.finished < goal and idle < _MOST_IDLE_STEPS:
            self._take_in(list(_due(waiting, began, world.now)))
            at, step = world.now, self._step()
            steps += 1
            progress(len(jobs) - goal + transitions.finished)
            arrival = began + waiting[-1][1].at_s if waiting else None
            times = (world.next_event(), arrival, step.wake_at, self._next_look(step))
            following = min((time for time in times if time is not None), default=None)
            if following is None:
                break  # nothing will ever happen again: what still waits is lost
            world.advance(max(following, at) + self._quantum_s)
            idle = idle + 1 if world.now == at and not step.started else 0
        return steps

    def _step(self) -> Step:
        world = self.world
        for program in self._engine.note_memory():
            self._look_again(program)
        return self._controller.step(Sample(snapshot=world.snapshot(), cpu_percent=0.0, loads=world.loads()))

    def _look_again(self, program: SimulatedProgram) -> None:
        """When a job that has grown just now would have settled."""
        settle_s = self._policy.rules.settle_s
        if self._policy.learns and settle_s is not None:
            ran_s = self.world.now - program.started_at
            heapq.heappush(self._looks, program.started_at + max(ran_s + settle_s, 2 * ran_s) + _MOMENT_S)

    def _next_look(self, step: Step) -> float | None:
        """The daemon looks every second; here it is enough to look when that may tell something new."""
        now = self.world.now
        while self._looks and self._looks[0] <= now:
            heapq.heappop(self._looks)
        times = self._looks[:1]
        if self.world.changed:
            times.append(now + _LOOK_EVERY_S)
        if step.waits_for_sample and not self.world.is_calm:
            times.append(now + LOAD_HALF_LIFE_S)
        return min(times, default=None)

    def _integrals(self) -> tuple[float, float]:
        cards = self.world.cards
        for card in cards:
            card.change(self.world.now)
        return sum(card.memory_mb_s for card in cards), sum(card.compute_s for card in cards)

    # Arrivals

    def _take_in(self, arrivals: list[Arrival]) -> None:
        """Those of a kind that arrive together are one submission."""
        for _, job in filter(lambda arrival: arrival[1].is_foreign, arrivals):
            self._let_in(job)
        ours = [arrival for arrival in arrivals if not arrival[1].is_foreign]
        for _, alike in groupby(sorted(ours, key=_kind), key=_kind):
            self._submit(list(alike))

    def _submit(self, alike: list[Arrival]) -> None:
        job = alike[0][1]
        submission = Submission(
            token="",
            spec=_spec(job, self._policy, max(self._sizes_mb)),
            priority=job.priority,
            count=len(alike),
            elements=[ArrayElement()] * len(alike),
        )
        first, _ = _result_of(self._requests.submit(submission, ME.user))
        self._engine.jobs.update(enumerate(alike, first))

    def _let_in(self, job: TraceJob) -> None:
        """A stranger, who goes where there is most room."""
        place = max(range(len(self.world.cards)), key=self._free_mb)
        self.world.begin(self.world.make(job, _FOREIGN, (place,)))

    def _free_mb(self, place: int) -> float:
        card = self.world.cards[place]
        return card.total_mb - card.used_mb


def _due(waiting: list[Arrival], began: float, now: float) -> Iterator[Arrival]:
    """Takes those from the end of the list that have arrived by now."""
    while waiting and began + waiting[-1][1].at_s <= now:
        yield waiting.pop()


def _kind(arrival: Arrival) -> tuple[str, int, int, float, bool]:
    job = arrival[1]
    return job.program, job.priority, job.gpus, job.declared_mb or 0.0, job.is_urgent


def _spec(job: TraceJob, policy: Policy, card_mb: float) -> JobSpec:
    return JobSpec(
        command=_words(job.program),
        cwd="/",
        environment={},
        need=policy.need_of(job, card_mb),
        preempts=job.is_urgent,
    )


@lru_cache(maxsize=4096)
def _words(program: str) -> tuple[str, ...]:
    return tuple(shlex.split(program))


def _result_of(pieces: InPieces[T]) -> T:
    """What a request comes to, done in one go."""
    try:
        while True:
            next(pieces)
    except StopIteration as stop:
        result: T = stop.value
        return result


def _run(program: SimulatedProgram, outcome: OutcomeKind, ended_at: float, began: float) -> SimulatedRun:
    return SimulatedRun(
        job=program.number,
        started_s=program.started_at - began,
        ended_s=ended_at - began,
        devices=program.devices,
        outcome=outcome,
        peak_mb=program.peak_mb,
        done_s=program.progress_s,
        paused_s=program.paused_s,
        suspensions=program.suspensions,
    )
