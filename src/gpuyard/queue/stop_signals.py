"""StopSignals: warns, stops and kills attempts when their time has come, by what is recorded: a next daemon goes on.

- A stop is recorded before SIGTERM is sent. A warning (`model/stopping.py`) goes to processes that handle it, and is
  recorded in the next step. Both may be sent twice.
- A program that could not be warned in time, because no daemon ran, is warned late and stopped as much later. One that
  ends before the number of its warned processes is known counts as warned: it may have saved its work.
"""

import json
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from gpuyard.model.job import Attempt, OutcomeKind
from gpuyard.model.job_spec import StopWarning
from gpuyard.model.lifecycle import IN_SUSPENSION, JobState
from gpuyard.model.stopping import signal_name, warn_at
from gpuyard.model.units import format_duration
from gpuyard.ports import Signalling
from gpuyard.queue.engine_set import EngineSet
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.transitions import JobTransitions


class StopSignals:
    def __init__(self, transitions: JobTransitions, engines: EngineSet) -> None:
        self._transitions, self._engines = transitions, engines
        self._stopped: set[int] = set()
        self._has_unstopped = False
        self._ended: set[str] = set()
        # By attempt: how many processes were warned, and when to try again those of which none handled the signal.
        self._warned: dict[str, int] = {}
        self._being_warned: set[str] = set()  # the engine looks for their processes
        self._warn_again: dict[str, float] = {}

    def record_warnings(self, now: float, ended: Collection[int] = ()) -> None:
        """Record the warnings that were sent, before ends are recorded: those of the jobs `ended`."""
        apart = self._transitions.live.apart.values()
        self._warn([each for each in apart if each.attempt.key in self._being_warned], now)
        self._ended = {each.attempt.key for each in apart if each.job.id in ended}
        warned = self._warned.keys() | (self._being_warned & self._ended)
        for live in [each for each in apart if each.attempt.key in warned]:
            if warn_at(live.job.spec, live.job.state, live.attempt) is not None:
                self._transitions.note_warning(live.job.id, now, _warning_note(live, self._warned, now))

    def stop_overdue(self, now: float) -> None:
        killed: list[Attempt] = []
        for live in [each for each in self._transitions.live.apart.values() if each.attempt.key not in self._ended]:
            attempt = live.attempt
            is_running = live.job.state is JobState.RUNNING  # the time limit pauses while a job is suspended
            is_due = attempt.stop_at is not None and attempt.stop_at <= now
            if is_due and self._has_missed_warning(live):
                assert live.job.spec.warning is not None
                stop_at = now + live.job.spec.warning.lead_s
                kill_at = None if attempt.kill_at is None else stop_at + live.job.spec.grace_s
                self._transitions.keep_attempt(live, replace(attempt, stop_at=stop_at, kill_at=kill_at))
            elif is_running and is_due:
                self._transitions.stop(live.job.id, OutcomeKind.TIMED_OUT, now)
            elif attempt.kill_at is not None and attempt.kill_at <= now:
                killed.append(attempt)
                self._transitions.postpone_kill(live.job.id, now + 5.0)
        self._engines.signal_each(killed, signal.SIGKILL, Signalling.SOON)

    def _has_missed_warning(self, live: Live) -> bool:
        """Return whether no daemon ran when the warning was due: it was not tried."""
        is_unsent = not any(live.attempt.key in tried for tried in (self._warned, self._being_warned, self._warn_again))
        return is_unsent and warn_at(live.job.spec, live.job.state, live.attempt) is not None

    def send(self, now: float) -> None:
        """Signal attempts that are due; those that are to stop again if no process was found, and after a crash."""
        live = self._transitions.live.apart
        due = []
        for each in live.values():
            due_at = None if each.job.spec.warning is None else warn_at(each.job.spec, each.job.state, each.attempt)
            is_due = due_at is not None and max(due_at, self._warn_again.get(each.attempt.key, 0.0)) <= now
            if is_due and each.attempt.key not in self._warned:
                due.append(each)
        self._warn(due, now)
        stopping = {
            job_id: each.attempt
            for job_id, each in live.items()
            if each.attempt.stopping is not None and (each.attempt.stop_at is None or each.attempt.stop_at <= now)
        }
        self._stopped &= stopping.keys()
        asked = [each for job_id, each in stopping.items() if job_id not in self._stopped]
        counts = self._engines.signal_each(asked, signal.SIGTERM)
        reached = [attempt for attempt, count in zip(asked, counts, strict=True) if count]
        self._stopped |= {attempt.job_id for attempt in reached}
        parked = [attempt for attempt in reached if attempt.parked is not None]
        self._engines.signal_each(parked, signal.SIGCONT, Signalling.SOON)  # a stopped process does not handle SIGTERM
        self._has_unstopped = len(self._stopped) < len(stopping)

    def _warn(self, lives: Sequence[Live], now: float) -> None:
        """Send the warning, or ask how many processes got the one that is under way."""
        due: dict[StopWarning, list[Attempt]] = {}
        for live in lives:
            if live.job.spec.warning is not None:
                due.setdefault(live.job.spec.warning, []).append(live.attempt)
        for warning, attempts in due.items():
            delay_s = min(5.0, max(0.1, warning.lead_s * 0.05))
            counts = self._engines.signal_each(attempts, warning.signum, Signalling.HANDLERS)
            for attempt, count in zip(attempts, counts, strict=True):
                self._being_warned.discard(attempt.key)
                if count is None:
                    self._being_warned.add(attempt.key)
                elif count:
                    self._warned[attempt.key] = count
                else:
                    self._warn_again[attempt.key] = now + delay_s

    def wake_times(self, now: float) -> Iterator[float]:
        """Yield when the next signals are due."""
        live = self._transitions.live
        has_tried = self._warned or self._warn_again or self._being_warned
        keys = {each.attempt.key for each in live.apart.values()} if has_tried else set()
        self._being_warned &= keys
        self._warned = {key: count for key, count in self._warned.items() if key in keys}
        self._warn_again = {key: at for key, at in self._warn_again.items() if key in keys}
        if self._has_unstopped:
            yield now + 0.05
        for each in live.apart.values():
            if each.attempt.key not in self._ended and each.job.state not in IN_SUSPENSION:
                yield from self._wake_times_of(each, now)

    def _wake_times_of(self, live: Live, now: float) -> Iterator[float]:
        attempt = live.attempt
        due_at = warn_at(live.job.spec, live.job.state, attempt)
        if due_at is not None and attempt.key not in self._being_warned:
            yield now if attempt.key in self._warned else max(due_at, self._warn_again.get(attempt.key, 0.0))
        is_asked = attempt.stop_at is None or attempt.stop_at <= now
        next_at = attempt.kill_at if attempt.stopping is not None and is_asked else attempt.stop_at
        if next_at is not None:
            yield next_at


def _warning_note(live: Live, warned: Mapping[str, int], now: float) -> str:
    assert live.job.spec.warning is not None
    left = format_duration(max(0.0, (live.attempt.stop_at or now) - now))
    before = "it is stopped" if live.attempt.stopping is not None else "its time limit"
    name, count = signal_name(live.job.spec.warning.signum), warned.get(live.attempt.key)
    processes = "its processes" if count is None else "1 process" if count == 1 else f"{count:,} processes"
    return f"signal {name} to {processes}, {left} before {before}"


_SETTING = "asleep"
# Less than this is no sleep: the two clocks behind it are not read at the same moment.
_LEAST_S = 1.0


class MachineSleep:
    """The time in which the machine is suspended does not count as run time of its jobs: it extends their time limits
    and grace periods. Queue time goes on, and so do waiting and ageing.

    The store has how much sleep is accounted for: a sleep counts once, also after a restart of the daemon.
    """

    def __init__(self, transitions: JobTransitions, boot_id: str | None) -> None:
        self._transitions, self._boot_id = transitions, boot_id
        self._accounted: float | None = None  # as in the store; None until it was read for this boot

    def record(self, asleep: float, now: float) -> None:
        """Account for sleep since the last call, in a transaction. With an unknown boot (macOS) it is run time."""
        if self._boot_id is None or (self._accounted is not None and abs(asleep - self._accounted) < _LEAST_S):
            return
        store = self._transitions.store
        boot_id, accounted = json.loads(store.setting(_SETTING) or "[null, 0.0]")
        slept_s = asleep - accounted
        is_same_boot = boot_id == self._boot_id
        if is_same_boot and abs(slept_s) < _LEAST_S:
            self._accounted = accounted  # and not when it is written: that may be rolled back
            return
        store.set_setting(_SETTING, json.dumps([self._boot_id, asleep]))
        if not is_same_boot or slept_s <= 0:
            return
        text = f"the machine was suspended for {format_duration(round(slept_s))}, which does not count as run time"
        for live in list(self._transitions.live.values()):
            attempt = live.attempt
            if attempt.engine or attempt.suspended_at is not None:
                continue  # it runs elsewhere, or its run time is paused anyway
            stop_at, kill_at = (None if at is None else at + slept_s for at in (attempt.stop_at, attempt.kill_at))
            attempt = replace(attempt, suspended_s=attempt.suspended_s + slept_s, stop_at=stop_at, kill_at=kill_at)
            self._transitions.keep_attempt(live, attempt)
            store.add_event(live.job.id, now, "asleep", text)
