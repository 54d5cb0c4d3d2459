"""A probe in its chain, with its record: the problem that stands, how long it rests, whether its answer is due."""

import shutil
import time
from collections.abc import Callable

from gpuyard.core.snapshot import Problem, Reading
from gpuyard.errors import ProbeCrashed, ProbeError, ProbeTimeout
from gpuyard.ports import Clock, Probe
from gpuyard.probes.common.backoff import Backoff
from gpuyard.probes.common.error_to_problem import as_problem
from gpuyard.probes.common.worker_thread import NoAnswerYet, WorkerThread


class ChainStep:
    def __init__(self, probe: Probe, clock: Clock) -> None:
        self._probe = probe
        self._clock = clock
        self._worker: WorkerThread[Reading] = WorkerThread(f"gpuyard-{probe.name}")
        self._backoff = Backoff()
        self._asked_at = 0.0
        self.problem: Problem | None = None
        self.is_late = False

    @property
    def name(self) -> str:
        return self._probe.name

    @property
    def may_hang(self) -> bool:
        return self._probe.may_hang

    def is_present(self) -> bool:
        """A guess that costs nothing: libraries are known only by trying them."""
        return self.may_hang or shutil.which(self.name) is not None

    def is_resting(self) -> bool:
        return self._backoff.is_resting(self._clock.monotonic())

    def read(self, timeout_s: float) -> Reading | None:
        """The probe's answer within that time, or `None` and a problem that stands."""
        reading = self.ask(timeout_s)
        return self.wait(0.0) if self.is_late else reading

    def ask(self, timeout_s: float) -> Reading | None:
        """The answer; `None` where it failed, and where it `is_late`: then `wait` is to be called."""
        if not self.may_hang:
            return self._settle(lambda: self._probe.read(timeout_s))
        if not self._worker.start(lambda: self._probe.read(timeout_s)):
            self._fail(
                ProbeTimeout(self.name, "an earlier call has not come back", hint="the driver may hang: see dmesg")
            )
            return None
        self._asked_at = time.monotonic()
        try:
            return self._settle(lambda: self._worker.finish(timeout_s))
        except NoAnswerYet:
            self.is_late = True
            return None

    def wait(self, timeout_s: float) -> Reading | None:
        """What a late probe answers at last; then its time is over."""
        self.is_late = False
        try:
            return self._settle(lambda: self._worker.finish(timeout_s))
        except NoAnswerYet:
            waited = time.monotonic() - self._asked_at
            hint = "the driver may be waking up or stuck: try a longer --deadline, see dmesg"
            self._fail(ProbeTimeout(self.name, f"no answer within {waited:.1f} s", hint=hint))
            return None

    def _settle(self, answer: Callable[[], Reading]) -> Reading | None:
        try:
            reading = answer()
        except ProbeError as error:
            self._fail(error)
            return None
        except NoAnswerYet:
            raise
        except Exception as error:  # noqa: BLE001 - one of the three outermost places: a probe's bug blinds only it
            bug = f"{type(error).__name__}: {error}"
            self._fail(ProbeCrashed(self.name, f"unexpected {bug[:200]}", hint="please report this"))
            return None
        self._backoff.succeed()
        self.problem = None
        return reading

    def _fail(self, error: ProbeError) -> None:
        """The same trouble in other words leaves the problem as it is, since it is no news."""
        self._backoff.fail(error.kind, self._clock.monotonic())
        if self.problem is None or self.problem.kind != error.kind:
            self.problem = as_problem(error, self._probe.vendor)
