"""Guards of the memory of cards and of the machine's RAM: the youngest job makes way before the memory is gone.

The rules are in `policy/memory_guards.py`. `note` follows each reading, `act` is part of a step.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault
from gpuyard.model.job import OutcomeKind, SuspendedBy
from gpuyard.model.job_spec import OnPreempt
from gpuyard.model.lifecycle import IN_SUSPENSION, JobState
from gpuyard.model.machine_snapshot import Device, Sample
from gpuyard.model.units import format_size
from gpuyard.policy import memory_guards as guards
from gpuyard.policy.device_state import capacity
from gpuyard.policy.foreign_load import SteadyGate
from gpuyard.policy.memory_guards import Alarm, HostProgram, MemoryClimb
from gpuyard.policy.numbers import SPARED_S
from gpuyard.policy.usage_curve import devices_to_watch
from gpuyard.policy.wait_reasons import Reason
from gpuyard.ports import LeaseLedger
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.suspend_jobs import SuspendControl
from gpuyard.queue.transitions import JobTransitions


class MemoryGuard:
    def __init__(
        self,
        transitions: JobTransitions,
        suspend_control: SuspendControl,
        leases: LeaseLedger,
        from_wall: Callable[[float], float],
    ) -> None:
        self.watched: frozenset[str] = frozenset()  # devices that are read often
        self.suspended = 0  # how often a job was suspended
        self._transitions, self._suspend_control, self._leases = transitions, suspend_control, leases
        self._from_wall = from_wall
        self._last: Sample | None = None
        self._climbs: dict[tuple[int, int], dict[str, MemoryClimb]] = {}  # by job and attempt, on each device
        self._cards: dict[str, MemoryClimb] = {}  # used memory where the driver lists no processes
        self._gates: dict[str, SteadyGate] = {}
        self._alarms: dict[str, Alarm] = {}
        self._left_at: dict[int, float] = {}  # when a job that the guard has suspended was last seen suspended
        self._kept_at: dict[int, float] = {}  # when a job could not make way

    def note(self, sample: Sample, held_mb: Mapping[int, Mapping[str, float | None]], now: float) -> bool:
        """Judge the cards by a new reading and by what each job holds. Return whether a job has to make way."""
        if sample is self._last:
            return bool(self._alarms)
        self._last = sample
        first_runs = self.first_runs()
        self._forget(now)
        self._note_climbs(sample, held_mb, now)
        # On which a first run is, and a job grows: it or another one.
        with_first_runs = {each for live in first_runs.values() for each in live.attempt.devices}
        climbs = chain.from_iterable(each.items() for each in self._climbs.values())
        growing = frozenset(each for each, climb in climbs if each in with_first_runs and climb.rate_mb_s)
        self.watched = devices_to_watch((live.attempt for live in first_runs.values()), now) | growing
        self._alarms = {}
        if not first_runs and not self._gates:
            return False
        # Devices that are closed now, or on which a job may grow beside a first run.
        ids = {*self._gates, *growing, *sample.snapshot.hiding.intersection(with_first_runs)}
        for device in [each for each in sample.snapshot.devices if each.id in ids]:
            alarm = self._alarm(device, first_runs, now)
            gate = guards.judge_card(self._gates.pop(device.id, SteadyGate()), *_figures(device), alarm, now)
            if gate.is_closed:
                self._gates[device.id] = gate
            if alarm is not None and alarm.victim is not None and now >= self._kept_at.get(alarm.victim, 0.0):
                self._alarms[device.id] = alarm
        return bool(self._alarms)

    def closed(self) -> dict[str, Reason]:
        """Return why nothing new starts on a card, for each such card."""
        if not self._gates or self._last is None:
            return {}
        devices = filter(None, map(self._last.snapshot.device, self._gates))
        return {device.id: guards.closed_reason(device.id, *_figures(device)) for device in devices}

    def act(self, rules: Rules, now: float) -> None:
        """Let a job make way on each card with an alarm, if that still holds: jobs may have ended since."""
        if not self._alarms or self._last is None:
            return
        first_runs = self.first_runs()
        for device in filter(None, map(self._last.snapshot.device, self._alarms)):
            alarm = self._alarm(device, first_runs, now)
            if alarm is not None and alarm.victim is not None:
                self._make_way(first_runs, device, alarm, rules, now)
        self._alarms = {}

    def _make_way(self, first_runs: Mapping[int, Live], device: Device, alarm: Alarm, rules: Rules, now: float) -> None:
        """Suspend the victim, or stop it to queue it again if that costs little. If neither, leave it for a second."""
        live, sample, transitions = first_runs[alarm.victim or 0], self._last, self._transitions
        assert sample is not None
        why = f"it held more than the {format_size(live.attempt.reserved_mb)} reserved for it"
        if live.job.id in transitions.live.unpredicted:
            why = "it was the youngest first run"
        text = f"{guards.alarm_text(alarm, sample.snapshot.labels.get(device.id, device.id), live.job.id)}; {why}"
        why_not: str | None = "--on-preempt requeue"
        if live.job.spec.on_preempt is not OnPreempt.REQUEUE:
            why_not = self._suspend_control.why_not(live, sample, rules)
        if why_not is None:
            self.suspended += 1
            self._left_at[live.job.id] = now
            transitions.suspend(live.job.id, SuspendedBy.MEMORY_GUARD, now, text)
            transitions.publish_made_way(live.job.id, now, text)
        elif guards.may_stop(alarm, live.attempt.ran_s(now)):
            peak_mb = (live.attempt.usage and live.attempt.usage.peak_mb) or 0.0
            size, foreign = _figures(device)[1], self._foreign_mb(device) or 0.0
            room = guards.room_to_restart(peak_mb, live.attempt.reserved_mb or 0.0, size, foreign)
            growth = guards.grown_need(live.job.growth, room)
            transitions.set_growth(live.job.id, growth)
            text = f"{text}, and cannot be suspended ({why_not}); it needs {format_size(growth.memory_mb)} next time"
            transitions.stop(live.job.id, OutcomeKind.MEMORY_GUARD, now, text)
            transitions.publish_made_way(live.job.id, now, text)
        else:
            self._kept_at[live.job.id] = now + 1.0

    def first_runs(self) -> dict[int, Live]:
        """Return the running jobs whose need is unknown, and those that hold more than they reserve."""
        jobs = self._transitions.live
        return {
            job_id: live
            for job_id, live in (*jobs.unpredicted.items(), *jobs.outgrown.items())
            if live.job.state is JobState.RUNNING and live.attempt.lease_id is not None
        }

    def _on(self, device: Device) -> Iterable[Live]:
        return self._transitions.live.on_device.get(device.id, {}).values()

    def _note_climbs(self, sample: Sample, held_mb: Mapping[int, Mapping[str, float | None]], now: float) -> None:
        """Note what each job holds: also of jobs that stay within their memory, as these may outgrow it later."""
        for job_id, on_devices in held_mb.items():
            live = self._transitions.live.get(job_id)
            if live is None:
                continue
            attempt = live.attempt
            climbs = self._climbs.setdefault((job_id, attempt.number), {})
            began_at = attempt.since if not attempt.suspended_s else None
            for device_id, mb in on_devices.items():
                # What is put back on a device is no growth.
                if mb is None or live.job.state in (JobState.SUSPENDED, JobState.RESUMING):
                    climbs.pop(device_id, None)
                elif not sample.reread or device_id in sample.reread:
                    climbs[device_id] = climbs.get(device_id, MemoryClimb()).add(now, mb, began_at)
        for device in filter(None, map(sample.snapshot.device, sample.snapshot.hiding)):
            if device.memory_used_mb is not None:
                self._cards[device.id] = self._cards.get(device.id, MemoryClimb()).add(now, device.memory_used_mb)

    def _alarm(self, device: Device, first_runs: Mapping[int, Live], now: float) -> Alarm | None:
        free, size = _figures(device)
        if not size:
            return None
        here = [live for live in self._on(device) if live.job.state is not JobState.SUSPENDED]
        jobs = [self._guarded(live, device, first_runs, now) for live in here]
        card = self._cards.get(device.id)
        if device.hides_processes and card is not None:
            # It is not known which job grows: the youngest first run that cannot be measured counts as the one.
            live = self._transitions.live
            unknown = [job for job in jobs if job.is_first_run and not self._climb(live[job.job_id], device.id)]
            youngest = max(unknown, key=lambda job: job.since, default=None)
            rates = {"rate_mb_s": card.rate_mb_s, "steady_mb_s": card.steady_mb_s}
            jobs = [replace(job, **rates) if job is youngest else job for job in jobs]
        return guards.find_alarm(free, size, jobs, has_other_leases=lambda: self._has_other_leases(device, now))

    def _climb(self, live: Live, device_id: str) -> MemoryClimb | None:
        return self._climbs.get((live.job.id, live.attempt.number), {}).get(device_id)

    def _guarded(self, live: Live, device: Device, first_runs: Mapping[int, Live], now: float) -> guards.GuardedJob:
        attempt = live.attempt
        climb = self._climb(live, device.id) or MemoryClimb()
        return guards.GuardedJob(
            job_id=live.job.id,
            since=attempt.since,
            held_mb=climb.held_mb,
            rate_mb_s=climb.rate_mb_s,
            steady_mb_s=climb.steady_mb_s,
            is_first_run=live.job.id in first_runs,
            is_leaving=_is_leaving(live, now),
            is_spared=self.is_spared(live.job.id, now),
            may_be_moved=live.job.spec.on_preempt is not OnPreempt.NEVER,
            missing_mb=max(0.0, (attempt.reserved_mb or 0.0) - climb.held_mb),
        )

    def is_spared(self, job_id: int, now: float) -> bool:
        """Return whether the job was resumed less than a minute ago, after it had made way."""
        return now - self._left_at.get(job_id, -SPARED_S) < SPARED_S

    def _foreign_mb(self, device: Device) -> float | None:
        """Return the memory of the device that no job of this queue holds; None if that cannot be measured."""
        climbs = [self._climb(each, device.id) for each in self._on(device)]
        free, size = _figures(device)
        if device.hides_processes or not size:
            return None
        return max(0.0, size - free - sum(climb.held_mb for climb in climbs if climb is not None))

    def _has_other_leases(self, device: Device, now: float) -> bool:
        """Return whether another lease was here before the only job of this queue on it, and holds memory. With
        younger or small leases, any user could have the job suspended, and the time of a lease is in its file."""
        foreign, device_id = self._foreign_mb(device), device.id
        if foreign is None or foreign < guards.reserve_mb(_figures(device)[1]):
            return False
        own = {live.attempt.lease_id for live in self._transitions.live.values()}
        first = min((live.attempt.since for live in self._on(device) if not _is_leaving(live, now)), default=0.0)
        try:
            others = [lease for lease in self._leases.read()[0] if lease.id not in own]
        except EnvironmentFault:
            return False
        return any(lease.on(device_id) is not None and self._from_wall(lease.since) <= first for lease in others)

    def _forget(self, now: float) -> None:
        live = self._transitions.live
        for each in live.apart.values():
            if each.job.state in IN_SUSPENSION and each.attempt.parked is SuspendedBy.MEMORY_GUARD:
                self._left_at[each.job.id] = now
        for known in (self._left_at, self._kept_at):
            for job_id in known.keys() - live.keys():
                del known[job_id]
        self._climbs = {key: climbs for key, climbs in self._climbs.items() if key[0] in live}


def _is_leaving(live: Live, now: float) -> bool:
    """Return whether the memory of the job will be free soon."""
    if live.job.state is JobState.STOPPING:
        return guards.stops_soon(live.attempt.stop_at, live.attempt.kill_at, now)
    return live.job.state is JobState.SUSPENDING


def _figures(device: Device) -> tuple[float, float]:
    """Return the free memory and the size of a device; no size if one of them is unknown."""
    free, size = device.memory_free_mb, capacity(device)
    return (0.0, 0.0) if free is None or size is None else (free, size)


class ProgramsBeside:
    """Programs beside the jobs of this queue, by their leases: scripts, `gpuyard run`, and jobs of other users' queues.
    The host guard compares the age of its jobs with theirs: the youngest makes way, and it can only stop jobs."""

    def __init__(self, transitions: JobTransitions, leases: LeaseLedger, from_wall: Callable[[float], float]) -> None:
        self._transitions, self._leases, self._from_wall = transitions, leases, from_wall
        self._read_at: float | None = None
        self._found: Sequence[HostProgram] = ()

    def read(self, now: float) -> Sequence[HostProgram]:
        """Return the programs whose RAM is known, as of at most a second ago; none if the ledger cannot be read."""
        if self._read_at is not None and 0.0 <= now - self._read_at < 1.0:  # near the floor, RAM is read every 0.1 s
            return self._found
        self._read_at, self._found = now, ()
        own = {live.attempt.lease_id for live in self._transitions.live.values()}
        with contextlib.suppress(EnvironmentFault):
            others = [lease for lease in self._leases.read()[0] if lease.id not in own]
            held_mb = self._leases.measure_holders(others) if others else {}
            known = [lease for lease in others if lease.id in held_mb]
            self._found = [HostProgram(since=self._from_wall(one.since), held_mb=held_mb[one.id]) for one in known]
        return self._found


class HostGuard:
    """`programs` returns the programs beside the jobs of this queue, at a time: it is called while RAM is short."""

    def __init__(
        self, transitions: JobTransitions, programs: Callable[[float], Sequence[HostProgram]] = lambda _: ()
    ) -> None:
        self._transitions, self._programs = transitions, programs
        self._last: Sample | None = None
        self._figures: tuple[float, float] | None = None  # available RAM, and how much of it stays free
        self._fall = MemoryClimb()
        self._climbs: dict[str, MemoryClimb] = {}  # by the key of an attempt: the RAM that it holds
        self._gate = SteadyGate()
        self._alarm: guards.HostAlarm | None = None
        self._must_kill = False
        self._hastened: set[str] = set()  # keys of attempts that are killed before their grace period is over
        self._times: dict[str, int] = {}  # by the key of an attempt: how often its job has made way before

    def note(self, sample: Sample, rules: Rules, now: float) -> bool:
        """Judge the machine by a new reading. Return whether a job has to make way, or to be killed."""
        if sample is self._last:
            return self._is_due
        host, before = sample.snapshot.host, self._last and self._last.snapshot.host
        if self._last is None or sample.ram_mb is not self._last.ram_mb:
            climbs, self._climbs = self._climbs, {}
            for (job_id, number), held in sample.ram_mb.items():
                live = self._transitions.live.get(job_id)
                if live is not None and live.attempt.number == number and not live.attempt.engine:
                    key = live.attempt.key
                    self._climbs[key] = climbs.get(key, MemoryClimb()).add(now, held, live.attempt.since)
        self._last = sample
        self._figures = guards.ram_figures(host, rules.host.keep_free_mb)
        if self._figures is None:
            self._fall, self._gate, self._alarm = MemoryClimb(), SteadyGate(), None
            return False
        available, floor = self._figures
        if host is not before:
            self._fall = self._fall.add(now, -available)
        self._alarm = None
        if guards.is_short(available, floor, self._fall, grows=True):
            self._alarm = self._find_alarm(list(self._jobs(now)), now)
        self._must_kill = guards.must_kill(available, floor, self._fall)
        self._gate = guards.judge_host(self._gate, available, floor, now, has_alarm=self._alarm is not None)
        return self._is_due

    @property
    def watch_every_s(self) -> float | None:
        """How often RAM is read between samples; None while no job runs on this machine."""
        if self._figures is None or all(live.attempt.engine for live in self._transitions.live.values()):
            return None
        return guards.watch_every_s(*self._figures)

    @property
    def _is_due(self) -> bool:
        return (self._alarm is not None and self._alarm.victim is not None) or any(self._to_kill())

    def closed_reasons(self) -> Iterator[Reason]:
        """Yield why nothing new starts on this machine."""
        if self._gate.is_closed and self._figures is not None:
            yield guards.host_closed_reason(*self._figures)

    def act(self, now: float) -> None:
        """Stop the job that makes way, if that still holds: jobs may have ended since."""
        sample, lives = self._last, self._transitions.live
        if sample is None or self._figures is None or not self._is_due:
            return
        available, floor = self._figures
        for live in list(self._to_kill()):
            self._hastened.add(live.attempt.key)
            self._transitions.postpone_kill(live.job.id, now)
        by_key = {each.attempt.key: each for each in lives.values()}
        self._hastened &= by_key.keys()
        self._times = {key: times for key, times in self._times.items() if key in by_key}
        for key in by_key.keys() - self._times.keys():  # a job in its first attempt never has
            job_id, number = by_key[key].job.id, by_key[key].attempt.number
            outcomes = [each.outcome for each in (self._transitions.store.attempts(job_id) if number > 1 else ())]
            self._times[key] = sum(each is not None and each.kind is OutcomeKind.HOST_GUARD for each in outcomes)
        jobs = {job.job_id: job for job in self._jobs(now)}
        self._alarm = self._find_alarm(list(jobs.values()), now)
        victim = None if self._alarm is None else self._alarm.victim
        if self._alarm is None or victim is None:
            return
        job, total = jobs[victim], sample.snapshot.host.memory_total_mb
        held = sum(each.held_mb for each in jobs.values())
        foreign = None if total is None else max(0.0, total - available - held)
        growth = guards.grown_ram(lives[victim].job.growth, guards.ram_to_restart(job.held_mb, floor, total, foreign))
        self._transitions.set_growth(victim, growth)
        text = guards.host_alarm_text(self._alarm, job, growth.ram_mb or 0.0)
        self._transitions.stop(victim, OutcomeKind.HOST_GUARD, now, text)
        self._alarm = None

    def _find_alarm(self, jobs: Sequence[guards.HostJob], now: float) -> guards.HostAlarm | None:
        assert self._figures is not None
        alarm = guards.find_host_alarm(*self._figures, self._fall, jobs)
        if alarm is None or alarm.victim is not None or not jobs:
            return alarm
        return guards.find_host_alarm(*self._figures, self._fall, jobs, self._programs(now))

    def _to_kill(self) -> Iterator[Live]:
        """Yield the jobs that were asked to make way, and whose grace period cannot be waited for."""
        for live in self._transitions.live.apart.values() if self._must_kill else ():
            if live.attempt.stopping is OutcomeKind.HOST_GUARD and live.attempt.key not in self._hastened:
                yield live

    def _jobs(self, now: float) -> Iterator[guards.HostJob]:
        """Yield the jobs of this queue whose processes run on this machine."""
        for live in self._transitions.live.values():
            attempt, spec, state = live.attempt, live.job.spec, live.job.state
            if attempt.engine:
                continue
            is_stopping, climb = state is JobState.STOPPING, self._climbs.get(attempt.key, MemoryClimb())
            yield guards.HostJob(
                job_id=live.job.id,
                since=attempt.since,
                held_mb=climb.held_mb,
                rate_mb_s=climb.rate_mb_s,
                declared_mb=spec.need.ram_mb,
                is_leaving=is_stopping and guards.stops_soon(attempt.stop_at, attempt.kill_at, now),
                times=self._times.get(attempt.key, 0),
                may_be_stopped=state is JobState.RUNNING and spec.on_preempt is not OnPreempt.NEVER,
            )
