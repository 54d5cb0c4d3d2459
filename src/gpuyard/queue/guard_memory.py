"""Watches the cards on which first runs grow, and lets the youngest of them make way before the memory is gone.

The rules are in `policy/memory_guards.py`. `note` follows each reading of the devices, `act` is part of a step.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain

from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault
from gpuyard.model.job import OutcomeKind, SuspendedBy
from gpuyard.model.job_spec import OnPreempt
from gpuyard.model.lifecycle import IN_SUSPENSION, JobState
from gpuyard.model.machine_snapshot import Device, Sample
from gpuyard.model.units import format_size
from gpuyard.policy.device_state import capacity
from gpuyard.policy.foreign_load import SteadyGate
from gpuyard.policy.memory_guards import (
    Alarm,
    GuardedJob,
    MemoryClimb,
    alarm_text,
    closed_reason,
    find_alarm,
    grown_need,
    judge_card,
    may_stop,
    reserve_mb,
    room_to_restart,
    stops_soon,
)
from gpuyard.policy.numbers import SPARED_S
from gpuyard.policy.usage_curve import devices_to_watch
from gpuyard.policy.wait_reasons import Reason
from gpuyard.ports import LeaseLedger
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.suspend_jobs import SuspendControl
from gpuyard.queue.transitions import JobTransitions

# A job that could not make way is not considered again at each reading.
_TRY_AGAIN_S = 1.0
# What is put back on a device is no growth.
_AWAY = (JobState.SUSPENDED, JobState.RESUMING)


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
        self._transitions = transitions
        self._suspend_control = suspend_control
        self._leases = leases
        self._from_wall = from_wall
        self._last: Sample | None = None
        self._climbs: dict[tuple[int, int], dict[str, MemoryClimb]] = {}  # by job and attempt, on each device
        self._cards: dict[str, MemoryClimb] = {}  # used memory where the driver lists no processes
        self._gates: dict[str, SteadyGate] = {}
        self._alarms: dict[str, Alarm] = {}
        self._left_at: dict[int, float] = {}  # when a job that the guard has suspended was last seen suspended
        self._kept_at: dict[int, float] = {}  # when a job could not make way

    def note(self, sample: Sample, held_mb: Mapping[int, Mapping[str, float | None]], now: float) -> bool:
        """Judge the cards by a new reading; `held_mb` is what each job holds on each device. Return whether a job has
        to make way."""
        if sample is self._last:
            return bool(self._alarms)
        self._last = sample
        first_runs = self.first_runs()
        self._forget(now)
        self._note_climbs(sample, held_mb, now)
        growing = self._growing_beside(first_runs)
        self.watched = devices_to_watch((live.attempt for live in first_runs.values()), now) | growing
        self._alarms = {}
        if not first_runs and not self._gates:
            return False
        for device in self._uncertain_devices(first_runs, growing, sample):
            alarm = self._alarm(device, first_runs, now)
            self._note_gate(device, alarm, now)
            if alarm is not None and alarm.victim is not None and now >= self._kept_at.get(alarm.victim, 0.0):
                self._alarms[device.id] = alarm
        return bool(self._alarms)

    def _growing_beside(self, first_runs: Mapping[int, Live]) -> frozenset[str]:
        """Return the devices that have a first run, and on which a job grows: it or another one."""
        with_first_runs = {each for live in first_runs.values() for each in live.attempt.devices}
        climbs = chain.from_iterable(each.items() for each in self._climbs.values())
        return frozenset(device_id for device_id, climb in climbs if device_id in with_first_runs and climb.rate_mb_s)

    def _uncertain_devices(
        self, first_runs: Mapping[int, Live], growing: Collection[str], sample: Sample
    ) -> Iterator[Device]:
        """Yield the devices that are closed now, or on which a job may grow beside a first run."""
        ids = {*self._gates, *growing}
        if hiding := sample.snapshot.hiding:
            ids |= hiding.intersection(each for live in first_runs.values() for each in live.attempt.devices)
        return (device for device in sample.snapshot.devices if device.id in ids)

    def closed(self) -> dict[str, Reason]:
        """Return why nothing new starts on a card, for each such card."""
        if not self._gates or self._last is None:
            return {}
        devices = filter(None, map(self._last.snapshot.device, self._gates))
        return {device.id: closed_reason(device.id, *_figures(device)) for device in devices}

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
        live, sample = first_runs[alarm.victim or 0], self._last
        assert sample is not None
        label = sample.snapshot.labels.get(device.id, device.id)
        text = f"{alarm_text(alarm, label, live.job.id)}; {self._why_this_job(live)}"
        is_stoppable = may_stop(alarm, live.attempt.ran_s(now))
        if not self.leave(live, device, text, sample, rules, now, may_be_stopped=is_stoppable):
            self._kept_at[live.job.id] = now + _TRY_AGAIN_S

    def leave(  # noqa: PLR0913, PLR0917 - everything that decides
        self, live: Live, device: Device, text: str, sample: Sample, rules: Rules, now: float, *, may_be_stopped: bool
    ) -> bool:
        """Suspend a first run for the reason `text`; where it cannot be suspended, stop it and queue it again if it
        `may_be_stopped`. Return False if it keeps running."""
        why_not = self.why_not_suspended(live, sample, rules)
        if why_not is None:
            self._suspend(live, text, now)
        elif may_be_stopped:
            growth = grown_need(live.job.growth, self._room(live, device))
            self._transitions.set_growth(live.job.id, growth)
            text = f"{text}, and cannot be suspended ({why_not}); it needs {format_size(growth.memory_mb)} next time"
            self._transitions.stop(live.job.id, OutcomeKind.MEMORY_GUARD, now, text)
            self._transitions.publish_made_way(live.job.id, now, text)
        else:
            return False
        return True

    def why_not_suspended(self, live: Live, sample: Sample, rules: Rules) -> str | None:
        if live.job.spec.on_preempt is OnPreempt.REQUEUE:
            return "--on-preempt requeue"
        return self._suspend_control.why_not(live, sample, rules)

    def _suspend(self, live: Live, text: str, now: float) -> None:
        self.suspended += 1
        self._left_at[live.job.id] = now
        self._transitions.suspend(live.job.id, SuspendedBy.MEMORY_GUARD, now, text)
        self._transitions.publish_made_way(live.job.id, now, text)

    def _why_this_job(self, live: Live) -> str:
        if live.job.id in self._transitions.live.unpredicted:
            return "it was the youngest first run"
        return f"it held more than the {format_size(live.attempt.reserved_mb)} reserved for it"

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
                if mb is None or live.job.state in _AWAY:
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
        jobs = [self._guarded(live, device, first_runs, now) for live in self._on(device) if _is_there(live)]
        card = self._cards.get(device.id)
        if device.hides_processes and card is not None:
            # It is not known which job grows: the youngest first run that cannot be measured counts as the one.
            unknown = [job for job in jobs if job.is_first_run and not self._is_measured(job.job_id, device.id)]
            youngest = max(unknown, key=lambda job: job.since, default=None)
            rates = {"rate_mb_s": card.rate_mb_s, "steady_mb_s": card.steady_mb_s}
            jobs = [replace(job, **rates) if job is youngest else job for job in jobs]
        return find_alarm(free, size, jobs, has_other_leases=lambda: self._has_other_leases(device, now))

    def _climb(self, live: Live, device_id: str) -> MemoryClimb | None:
        return self._climbs.get((live.job.id, live.attempt.number), {}).get(device_id)

    def _is_measured(self, job_id: int, device_id: str) -> bool:
        return self._climb(self._transitions.live[job_id], device_id) is not None

    def _guarded(self, live: Live, device: Device, first_runs: Mapping[int, Live], now: float) -> GuardedJob:
        attempt = live.attempt
        climb = self._climb(live, device.id) or MemoryClimb()
        return GuardedJob(
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

    def _room(self, live: Live, device: Device) -> float:
        """Return how much memory a stopped job gets at its next start."""
        size, foreign = _figures(device)[1], self._foreign_mb(device) or 0.0
        return room_to_restart(_peak_mb(live), live.attempt.reserved_mb or 0.0, size, foreign)

    def _has_other_leases(self, device: Device, now: float) -> bool:
        """Return whether another lease was on the device before the only job of this queue there. A younger one does
        not count, nor do leases where only this job holds memory: with a small lease, any user could have the job
        suspended, and the time of a lease is what its file says."""
        foreign, device_id = self._foreign_mb(device), device.id
        if foreign is None or foreign < reserve_mb(_figures(device)[1]):
            return False
        own = {live.attempt.lease_id for live in self._transitions.live.values()}
        first = min((live.attempt.since for live in self._on(device) if not _is_leaving(live, now)), default=0.0)
        try:
            others = [lease for lease in self._leases.read()[0] if lease.id not in own]
        except EnvironmentFault:
            return False
        return any(lease.on(device_id) is not None and self._from_wall(lease.since) <= first for lease in others)

    def _note_gate(self, device: Device, alarm: Alarm | None, now: float) -> None:
        gate = judge_card(self._gates.get(device.id, SteadyGate()), *_figures(device), alarm, now)
        if gate.is_closed:
            self._gates[device.id] = gate
        else:
            self._gates.pop(device.id, None)

    def _forget(self, now: float) -> None:
        live = self._transitions.live
        for each in live.apart.values():
            if each.job.state in IN_SUSPENSION and each.attempt.parked is SuspendedBy.MEMORY_GUARD:
                self._left_at[each.job.id] = now
        for known in (self._left_at, self._kept_at):
            for job_id in known.keys() - live.keys():
                del known[job_id]
        self._climbs = {key: climbs for key, climbs in self._climbs.items() if key[0] in live}


def _peak_mb(live: Live) -> float:
    return (live.attempt.usage.peak_mb if live.attempt.usage is not None else None) or 0.0


def _is_leaving(live: Live, now: float) -> bool:
    """Return whether the memory of the job will be free soon."""
    if live.job.state is JobState.STOPPING:
        return stops_soon(live.attempt.stop_at, live.attempt.kill_at, now)
    return live.job.state is JobState.SUSPENDING


def _is_there(live: Live) -> bool:
    return live.job.state is not JobState.SUSPENDED


def _figures(device: Device) -> tuple[float, float]:
    """Return the free memory and the size of a device; no size if one of them is unknown."""
    free, size = device.memory_free_mb, capacity(device)
    return (0.0, 0.0) if free is None or size is None else (free, size)
