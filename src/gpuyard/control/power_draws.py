"""What jobs draw, learned and measured, for the limit on the power of all GPUs (`core/scheduling/power_limit.py`)."""

from gpuyard.control.live_jobs import Live
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.scheduling.world import PowerLimit

# A running job of unknown draw that was measured for this long shows what it draws.
_SHOWN_S = 30.0
# In RAM: it draws nothing.
_MOVED_OUT = (JobState.SUSPENDED, JobState.RESUMING)


def power_limit(limit_w: float | None, transitions: JobTransitions) -> PowerLimit | None:
    """Return the limit with what jobs draw; None without a limit."""
    if limit_w is None:
        return None
    estimates, live = transitions.estimates, transitions.live.values()
    running = [each for each in live if each.attempt.devices and each.job.state not in _MOVED_OUT]
    return PowerLimit(
        limit_w=limit_w,
        running_w={each.job.id: _draw_w(each, estimates.power_w(each.job)) for each in running},
    )


def _draw_w(live: Live, learned_w: float | None) -> float | None:
    """Return the power per GPU: the learned or the measured one, whichever is higher; None: unknown."""
    energy = None if live.attempt.usage is None else live.attempt.usage.energy
    measured_w = None if energy is None else energy.peak_w
    if energy is None or measured_w is None:
        return learned_w
    if learned_w is None:
        return measured_w if energy.seconds >= _SHOWN_S * len(live.attempt.devices) else None
    return max(learned_w, measured_w)
