"""MachineSleep: the time in which the machine is suspended does not count as run time of its jobs.

Queue time goes on while a machine sleeps, and so do waiting and ageing. A program does not run meanwhile: its time
limit and its grace period are extended by the sleep, and the sleep is subtracted from how long the program ran.
"""

import json

from msgspec.structs import replace

from gpuyard.control.transitions import JobTransitions
from gpuyard.core.units import format_duration

_SETTING = "asleep"
# Less than this is no sleep: the two clocks behind it are not read at the same moment.
_LEAST_S = 1.0


class MachineSleep:
    """The store has how much sleep is accounted for: a sleep counts once, also after a restart of the daemon."""

    def __init__(self, transitions: JobTransitions, boot_id: str | None) -> None:
        self._transitions = transitions
        self._boot_id = boot_id
        self._accounted: float | None = None  # as in the store; None until it was read for this boot

    def record(self, asleep: float, now: float) -> None:
        """Account for the sleep since the last call. `asleep` is `Clock.asleep`. Needs a transaction.

        Where the boot is unknown (macOS), sleep counts as run time.
        """
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
        if is_same_boot and slept_s > 0:
            self._extend_run_times(slept_s, now)

    def _extend_run_times(self, slept_s: float, now: float) -> None:
        text = f"the machine was suspended for {format_duration(round(slept_s))}, which does not count as run time"
        for live in list(self._transitions.live.values()):
            attempt = live.attempt
            if attempt.engine or attempt.suspended_at is not None:
                continue  # it runs elsewhere, or its run time is paused anyway
            stop_at, kill_at = (None if at is None else at + slept_s for at in (attempt.stop_at, attempt.kill_at))
            paused_s = attempt.suspended_s + slept_s
            self._transitions.keep_attempt(
                live, replace(attempt, suspended_s=paused_s, stop_at=stop_at, kill_at=kill_at)
            )
            self._transitions.store.add_event(live.job.id, now, "asleep", text)
