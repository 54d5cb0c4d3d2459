"""One probe of a fallback chain, with its current problem, its backoff, and a pending answer."""

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
        """Guess without a call whether the probe can work. Libraries are assumed to be present."""
        return self.may_hang or shutil.which(self.name) is not None

    def is_resting(self) -> bool:
        return self._backoff.is_resting(self._clock.monotonic())

    def read(self, timeout_s: float) -> Reading | None:
        """Return the reading within the timeout, or None with `problem` set."""
        reading = self.ask(timeout_s)
        return self.wait(0.0) if self.is_late else reading

    def ask(self, timeout_s: float) -> Reading | None:
        """Return the reading; None if the probe failed, or if it `is_late`: then call `wait`."""
        if not self.may_hang:
            return self._note_result(lambda: self._probe.read(timeout_s))
        if not self._worker.start(lambda: self._probe.read(timeout_s)):
            self._fail(
                ProbeTimeout(self.name, "an earlier call has not returned", hint="the driver may hang: see dmesg")
            )
            return None
        self._asked_at = time.monotonic()
        try:
            return self._note_result(lambda: self._worker.finish(timeout_s))
        except NoAnswerYet:
            self.is_late = True
            return None

    def wait(self, timeout_s: float) -> Reading | None:
        """Return the reading of a late probe, or None with `problem` set if it is still not there."""
        self.is_late = False
        try:
            return self._note_result(lambda: self._worker.finish(timeout_s))
        except NoAnswerYet:
            waited = time.monotonic() - self._asked_at
            hint = "the driver may be waking up or stuck: try a longer --deadline, see dmesg"
            self._fail(ProbeTimeout(self.name, f"no answer within {waited:.1f} s", hint=hint))
            return None

    def _note_result(self, answer: Callable[[], Reading]) -> Reading | None:
        try:
            reading = answer()
        except ProbeError as error:
            self._fail(error)
            return None
        except NoAnswerYet:
            raise
        except Exception as error:  # noqa: BLE001 - outermost place: a bug in one probe disables only that probe
            bug = f"{type(error).__name__}: {error}"
            self._fail(ProbeCrashed(self.name, f"unexpected {bug[:200]}", hint="please report this"))
            return None
        self._backoff.succeed()
        self.problem = None
        return reading

    def _fail(self, error: ProbeError) -> None:
        """Record the failure. A failure of the same kind keeps the first problem, so that it is reported once."""
        self._backoff.fail(error.kind, self._clock.monotonic())
        if self.problem is None or self.problem.kind != error.kind:
            self.problem = as_problem(error, self._probe.vendor)
