"""Prepares the attempts that a plan starts, and records them before their keepers get them."""

from collections.abc import Sequence

from msgspec.structs import replace

from gpuyard.control.cluster_dispatch import ClusterDispatch
from gpuyard.control.engine_set import EngineSet
from gpuyard.control.launch_command import attempt_of, launch_after, launch_of, upcoming
from gpuyard.control.pin_cpus import CpuPinning
from gpuyard.control.rules import Rules
from gpuyard.control.slices import Slices
from gpuyard.control.start_pauses import StartPauses
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Job
from gpuyard.core.job.lifecycle import JobEvent
from gpuyard.core.scheduling.plan import Start
from gpuyard.core.snapshot import Snapshot
from gpuyard.errors import GpuyardError, UserError
from gpuyard.ports import HeldClaim


class JobLauncher:
    def __init__(  # noqa: PLR0913 - everything that a start concerns
        self,
        transitions: JobTransitions,
        engines: EngineSet,
        dispatch: ClusterDispatch,
        pauses: StartPauses,
        *,
        slices: Slices,
        boot_id: str | None,
    ) -> None:
        self._transitions = transitions
        self._engines = engines
        self._dispatch = dispatch
        self._pauses = pauses
        self._slices = slices
        self._boot_id = boot_id
        self._pinning = CpuPinning(transitions)
        self.has_rejected = False  # a job was rejected, and other jobs waited behind its start

    def launch(  # noqa: PLR0913 - everything that an attempt is started with
        self,
        start: Start,
        held: HeldClaim | None,
        snapshot: Snapshot,
        rules: Rules,
        now: float,
        *,
        rest: Sequence[Job] = (),
    ) -> int:
        """Prepare the attempt and record it; return 1, or 0 if it could not be prepared. `rest` are the jobs that run
        after it on its lease."""
        job = self._transitions.store.job(start.job_id)
        assert job is not None
        try:
            number, pinning = job.attempts + 1, self._pinning
            launch = launch_of(job, number, held, snapshot, rules, terms=start.terms, pinning=pinning)
            if job.spec.task is not None and job.attempts:
                launch = replace(launch, retried=self._describe_retry(job))
            if launch.ram_limit_mb is None:
                launch = replace(launch, rest=tuple(launch_after(launch, each) for each in rest))
            prepared = self._engines.prepare(launch, held.descriptor if held is not None else None)
        except GpuyardError as error:
            if held is not None:
                held.release()
            self._note_failure(job, start, error, now)
            return 0
        has_devices = bool(start.claim.shares) or start.terms is not None
        predicted_mb = self._transitions.estimates.predicted_mb(job) if has_devices else None
        attempt = attempt_of(job, prepared, start, held, predicted_mb=predicted_mb, boot_id=self._boot_id, now=now)
        attempt = replace(attempt, cpus=launch.cpus)
        self._transitions.start(job, attempt)
        for each, ready in zip(rest, prepared.rest, strict=False):
            self._transitions.start(each, upcoming(attempt, ready))
        self._slices.note(prepared, now)
        if start.terms is None:
            self._pauses.note_start(now)
        return 1

    def _describe_retry(self, job: Job) -> str:
        """Return which attempt of how many comes next, and how the last one ended."""
        most = job.attempts + 1 + max(0, job.spec.retries - job.failures)
        past = self._transitions.store.attempts(job.id)
        ended = past[-1].outcome if past else None  # the job may come from a backup
        why = "" if ended is None else f": {ended.reason or ended.kind}"
        return f"attempt {job.attempts + 1} of {most}{why}"

    def _note_failure(self, job: Job, start: Start, error: GpuyardError, now: float) -> None:
        if isinstance(error, UserError):
            self._transitions.apply(job, JobEvent.REJECT, now, str(error))
            self.has_rejected = True
        elif start.terms is not None:
            self._dispatch.delay_lane(job, str(error), now)
        else:
            self._pauses.note_fault(job.id, error, now)
