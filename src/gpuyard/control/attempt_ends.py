"""How attempts ended: what the engines tell is kept until it is recorded, and what follows from it is decided."""

import signal

from gpuyard.control.cluster_dispatch import ClusterDispatch
from gpuyard.control.engine_set import EngineSet
from gpuyard.control.live_jobs import Live
from gpuyard.control.track_usage import UsageTracker, time_of_end, verdict_on
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.crash_recovery import REBOOTED, after_reboot, died_with_the_machine, ended_before_reboot
from gpuyard.core.job.job import MemoryLack, Outcome, OutcomeKind
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.sample import Sample
from gpuyard.ports import Ended


class AttemptEnds:
    def __init__(
        self,
        transitions: JobTransitions,
        engines: EngineSet,
        observer: UsageTracker,
        cluster_dispatch: ClusterDispatch,
        boot_id: str | None,
    ) -> None:
        self._transitions = transitions
        self._engines = engines
        self._observer = observer
        self._cluster_dispatch = cluster_dispatch
        self._boot_id = boot_id
        self._unrecorded: dict[tuple[int, int], Ended] = {}

    def ask(self) -> None:
        if not self._unrecorded:  # an engine may forget what it told of when it is asked again
            self._unrecorded = {(ended.job_id, ended.attempt): ended for ended in self._engines.ended()}

    def forget_recorded(self) -> None:
        self._unrecorded.clear()

    def record(self, now: float, sample: Sample | None = None) -> bool:
        """Whether one of them had devices here."""
        left_devices = False
        for (job_id, number), ended in self._unrecorded.items():
            live = self._transitions.live.get(job_id)
            if live is None or live.attempt.number != number:
                continue  # recorded before, by a daemon that did not live to forget it
            left_devices = left_devices or live.attempt.lease_id is not None
            if died_with_the_machine(live.attempt, self._boot_id):
                self._end_of_earlier_boot(live, ended.outcome, now)
            else:
                self._end(live, ended, sample, now)
        return left_devices

    def _end(self, live: Live, ended: Ended, sample: Sample | None, now: float) -> None:
        job_id, attempt = live.job.id, live.attempt
        if attempt.stopping is not None or ended.outcome.kind is OutcomeKind.LOST:
            self._engines.signal(attempt, signal.SIGKILL)  # nothing of it may go on beside its next attempt
        if ended.usage is not None:
            self._transitions.note_usage(job_id, ended.usage)
            live = self._transitions.live[job_id]
        lack = self._observer.lack(live, ended)
        if lack is not None:
            self._end_short(live, ended, lack, sample, now)
            return
        verdict = self._cluster_dispatch.verdict(live, ended, now)
        if attempt.stopping is None and ended.outcome.kind is OutcomeKind.CANCELLED:
            self._transitions.stop(job_id, OutcomeKind.CANCELLED, time_of_end(ended, attempt, now))
        self._transitions.end(job_id, ended.outcome, time_of_end(ended, attempt, now), verdict=verdict, pid=ended.pid)

    def _end_short(self, live: Live, ended: Ended, lack: MemoryLack, sample: Sample | None, now: float) -> None:
        """It ran out of memory: it is run again with more, and none of its retries are used up."""
        outcome, verdict = verdict_on(live, lack, ended.outcome.status, sample)
        self._transitions.end(
            live.job.id, outcome, time_of_end(ended, live.attempt, now), verdict=verdict, pid=ended.pid, lack=lack
        )

    def _end_of_earlier_boot(self, live: Live, outcome: Outcome, now: float) -> None:
        """Nothing of it is left to be killed, and its pid may be another's by now."""
        if ended_before_reboot(outcome):
            self._transitions.end(live.job.id, outcome, now)
        else:
            verdict = after_reboot(live.job) if live.job.state is not JobState.STOPPING else None
            self._transitions.end(live.job.id, REBOOTED, now, verdict=verdict)
