"""Programs beside the jobs of this queue, by their leases: scripts, `gpuyard run`, and jobs of other users' queues.

The host guard compares the age of its jobs with theirs: the youngest makes way, and it can only stop jobs.

Watches the RAM of the machine, and lets the youngest job that holds much of it make way before it is gone.

The rules are in `policy/memory_guards.py`. `note` follows each reading of the RAM, `act` is part of a step.
"""

from collections.abc import Callable, Iterator, Sequence

from gpuyard.errors import EnvironmentFault
from gpuyard.model.job import OutcomeKind
from gpuyard.model.job_spec import OnPreempt
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Sample
from gpuyard.policy.foreign_load import SteadyGate
from gpuyard.policy.memory_guards import (
    HostAlarm,
    HostJob,
    HostProgram,
    HostWatch,
    MemoryClimb,
    find_host_alarm,
    grown_ram,
    host_alarm_text,
    host_closed_reason,
    is_short,
    judge_host,
    must_kill,
    next_watch,
    ram_figures,
    ram_to_restart,
    stops_soon,
)
from gpuyard.policy.wait_reasons import Reason
from gpuyard.ports import LeaseLedger
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.transitions import JobTransitions

# Near the floor, RAM is read ten times a second; who else is there is read less often.
_READ_EVERY_S = 1.0


class ProgramsBeside:
    """`from_wall` turns the time of a lease into queue time."""

    def __init__(self, transitions: JobTransitions, leases: LeaseLedger, from_wall: Callable[[float], float]) -> None:
        self._transitions = transitions
        self._leases = leases
        self._from_wall = from_wall
        self._read_at: float | None = None
        self._found: Sequence[HostProgram] = ()

    def read(self, now: float) -> Sequence[HostProgram]:
        """Return the programs and the RAM that they hold, as of at most a second ago. A program whose RAM is unknown is
        left out, as are all of them if the ledger cannot be read."""
        if self._read_at is None or not 0.0 <= now - self._read_at < _READ_EVERY_S:
            self._read_at, self._found = now, self._measure()
        return self._found

    def _measure(self) -> Sequence[HostProgram]:
        own = {live.attempt.lease_id for live in self._transitions.live.values()}
        try:
            others = [lease for lease in self._leases.read()[0] if lease.id not in own]
        except EnvironmentFault:
            return ()
        held_mb = self._leases.measure_holders(others) if others else {}
        return [
            HostProgram(since=self._from_wall(lease.since), held_mb=held_mb[lease.id])
            for lease in others
            if lease.id in held_mb
        ]


class HostGuard:
    """`programs` returns the programs beside the jobs of this queue, at a time: it is called while RAM is short."""

    def __init__(
        self, transitions: JobTransitions, programs: Callable[[float], Sequence[HostProgram]] = lambda _: ()
    ) -> None:
        self._transitions = transitions
        self._programs = programs
        self._last: Sample | None = None
        self._figures: tuple[float, float] | None = None  # available RAM, and how much of it stays free
        self._fall = MemoryClimb()
        self._climbs: dict[str, MemoryClimb] = {}  # by the key of an attempt: the RAM that it holds
        self._gate = SteadyGate()
        self._alarm: HostAlarm | None = None
        self._must_kill = False
        self._hastened: set[str] = set()  # keys of attempts that are killed before their grace period is over
        self._times: dict[str, int] = {}  # by the key of an attempt: how often its job has made way before

    def note(self, sample: Sample, rules: Rules, now: float) -> bool:
        """Judge the machine by a new reading. Return whether a job has to make way, or to be killed."""
        if sample is self._last:
            return self._is_due
        host, before = sample.snapshot.host, self._last and self._last.snapshot.host
        if self._last is None or sample.ram_mb is not self._last.ram_mb:
            self._note_climbs(sample, now)
        self._last = sample
        self._figures = ram_figures(host, rules.host.keep_free_mb)
        if self._figures is None:
            self._fall, self._gate, self._alarm = MemoryClimb(), SteadyGate(), None
            return False
        available, floor = self._figures
        if host is not before:
            self._fall = self._fall.add(now, -available)
        may_be_short = is_short(available, floor, self._fall, grows=True)
        self._alarm = self._find_alarm(available, floor, list(self._jobs(now)), now) if may_be_short else None
        self._must_kill = must_kill(available, floor, self._fall)
        self._gate = judge_host(self._gate, available, floor, now, has_alarm=self._alarm is not None)
        return self._is_due

    def _note_climbs(self, sample: Sample, now: float) -> None:
        climbs, self._climbs = self._climbs, {}
        for (job_id, number), held in sample.ram_mb.items():
            live = self._transitions.live.get(job_id)
            if live is not None and live.attempt.number == number and not live.attempt.engine:
                attempt = live.attempt
                self._climbs[attempt.key] = climbs.get(attempt.key, MemoryClimb()).add(now, held, attempt.since)

    @property
    def watch(self) -> HostWatch | None:
        """How often RAM is read between samples; None while no job runs on this machine."""
        if self._figures is None or all(live.attempt.engine for live in self._transitions.live.values()):
            return None
        return next_watch(*self._figures)

    @property
    def _is_due(self) -> bool:
        return (self._alarm is not None and self._alarm.victim is not None) or any(self._to_kill())

    def closed_reasons(self) -> Iterator[Reason]:
        """Yield why nothing new starts on this machine."""
        if self._gate.is_closed and self._figures is not None:
            yield host_closed_reason(*self._figures)

    def act(self, now: float) -> None:
        """Stop the job that makes way, if that still holds: jobs may have ended since."""
        sample = self._last
        if sample is None or self._figures is None or not self._is_due:
            return
        available, floor = self._figures
        for live in list(self._to_kill()):
            self._hastened.add(live.attempt.key)
            self._transitions.postpone_kill(live.job.id, now)
        self._count_times()
        jobs = {job.job_id: job for job in self._jobs(now)}
        self._alarm = self._find_alarm(available, floor, list(jobs.values()), now)
        victim = None if self._alarm is None else self._alarm.victim
        if self._alarm is None or victim is None:
            return
        job, live = jobs[victim], self._transitions.live[victim]
        total = sample.snapshot.host.memory_total_mb
        held = sum(each.held_mb for each in jobs.values())
        foreign = None if total is None else max(0.0, total - available - held)
        growth = grown_ram(live.job.growth, ram_to_restart(job.held_mb, floor, total, foreign))
        self._transitions.set_growth(victim, growth)
        text = host_alarm_text(self._alarm, job, growth.ram_mb or 0.0)
        self._transitions.stop(victim, OutcomeKind.HOST_GUARD, now, text)
        self._alarm = None

    def _find_alarm(self, available: float, floor: float, jobs: Sequence[HostJob], now: float) -> HostAlarm | None:
        alarm = find_host_alarm(available, floor, self._fall, jobs)
        if alarm is None or alarm.victim is not None or not jobs:
            return alarm
        return find_host_alarm(available, floor, self._fall, jobs, self._programs(now))

    def _to_kill(self) -> Iterator[Live]:
        """Yield the jobs that were asked to make way, and whose grace period cannot be waited for."""
        for live in self._transitions.live.apart.values() if self._must_kill else ():
            if live.attempt.stopping is OutcomeKind.HOST_GUARD and live.attempt.key not in self._hastened:
                yield live

    def _jobs(self, now: float) -> Iterator[HostJob]:
        """Yield the jobs of this queue whose processes run on this machine."""
        for live in self._transitions.live.values():
            attempt, spec, state = live.attempt, live.job.spec, live.job.state
            if attempt.engine:
                continue
            is_stopping, climb = state is JobState.STOPPING, self._climbs.get(attempt.key, MemoryClimb())
            yield HostJob(
                job_id=live.job.id,
                since=attempt.since,
                held_mb=climb.held_mb,
                rate_mb_s=climb.rate_mb_s,
                declared_mb=spec.need.ram_mb,
                is_leaving=is_stopping and stops_soon(attempt.stop_at, attempt.kill_at, now),
                times=self._times.get(attempt.key, 0),
                may_be_stopped=state is JobState.RUNNING and spec.on_preempt is not OnPreempt.NEVER,
            )

    def _count_times(self) -> None:
        """Count how often each job has made way before. A job in its first attempt never has."""
        live = {each.attempt.key: each for each in self._transitions.live.values()}
        self._hastened &= live.keys()
        self._times = {key: times for key, times in self._times.items() if key in live}
        for key in live.keys() - self._times.keys():
            attempts = self._transitions.store.attempts(live[key].job.id) if live[key].attempt.number > 1 else []
            kinds = [each.outcome.kind for each in attempts if each.outcome is not None]
            self._times[key] = kinds.count(OutcomeKind.HOST_GUARD)
