"""When the next step of the scheduler loop is due if nothing happens before, and the timer for it."""

import asyncio
from collections.abc import Callable

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.ports import Clock
from gpuyard.queue.batch_gates import BatchGates
from gpuyard.queue.step import Step
from gpuyard.queue.transitions import JobTransitions

# After a job has ended: when to sample again. A driver takes a while to free the memory.
_SETTLE_S = (0.002, 0.01, 0.05, 0.25)
_SAMPLE_AGAIN_S = 1.0
_TIMER_EARLY_S = 0.5
# The loop's clock stops while the machine is suspended, and the queue's does not.
_LONGEST_TIMER_S = 60.0
# Without a descriptor that reports the end of attempts.
_POLL_ENGINE_S = 0.1
_MEASURE_S, _MEASURE_RAM_S = 1.0, 5.0
_MEASURE_NEW_S, _NEW_S = 0.25, 2.0


class StepWaits:
    def __init__(self, transitions: JobTransitions, batch_gates: BatchGates, engine: LocalEngine, clock: Clock) -> None:
        self._transitions, self._batch_gates, self._engine, self._clock = transitions, batch_gates, engine, clock
        self._settled = len(_SETTLE_S)

    def settle(self) -> None:
        """Note that memory is being freed: jobs that wait for devices need several samples soon."""
        self._settled = 0

    def seconds(self, step: Step) -> float | None:
        """Return how long to wait after this step; None: until something happens."""
        waits = [] if step.wake_at is None else [max(0.0, step.wake_at - self._clock.now())]
        if self._batch_gates.is_waiting:
            waits.append(_SAMPLE_AGAIN_S)  # its averages need samples even while no further run may start
        if step.waits_for_devices and step.waits_for_sample and self._settled < len(_SETTLE_S):
            waits.append(_SETTLE_S[self._settled])
            self._settled += 1
        elif step.waits_for_devices:
            waits.append(_SAMPLE_AGAIN_S)
        if self._transitions.live:
            waits.append(self._next_measurement_s() if self._engine.fileno() >= 0 else _POLL_ENGINE_S)
        if (check_s := self._engine.containers.next_check_s()) is not None:
            waits.append(check_s)
        return min(waits, default=None)

    def _next_measurement_s(self) -> float:
        """Attempts on a device are measured every second, more often while one is new; others every 5 s."""
        if not any(live.attempt.devices for live in self._transitions.live.values()):
            return _MEASURE_RAM_S
        return _MEASURE_NEW_S if self._clock.now() - self._transitions.last_start_at < _NEW_S else _MEASURE_S


class StepTimer:
    """One timer of the running event loop."""

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._on_due = on_due
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float | None) -> None:
        """Keep a timer that fires up to `_TIMER_EARLY_S` early: setting one in each of 1000 steps a second is slow."""
        loop = asyncio.get_running_loop()
        due = None if seconds is None else loop.time() + min(seconds, _LONGEST_TIMER_S)
        if self._handle is not None and due is not None and due - _TIMER_EARLY_S <= self._handle.when() <= due:
            return
        self.cancel()
        self._handle = None if due is None else loop.call_at(due, self._fire, self._on_due)

    def retry_after(self, seconds: float, retry: Callable[[], None]) -> None:
        """Call `retry` in place of `on_due`, once."""
        self.cancel()
        self._handle = asyncio.get_running_loop().call_later(seconds, self._fire, retry)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self, on_due: Callable[[], None]) -> None:
        self._handle = None
        on_due()
