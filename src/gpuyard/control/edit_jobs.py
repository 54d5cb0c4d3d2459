"""JobEditor: changes the options of jobs that wait. A job that runs or has finished keeps its own."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from gpuyard.control.start_time import read_start_time
from gpuyard.control.transitions import JobTransitions
from gpuyard.control.user_requests import refuse_pending
from gpuyard.core.job.job import Job
from gpuyard.core.job.lifecycle import WAITING, JobEvent, JobState
from gpuyard.core.job.resubmit import edited
from gpuyard.core.job.submission import Submission
from gpuyard.core.units import format_duration, parse_duration
from gpuyard.errors import UserError
from gpuyard.ports import Clock
from gpuyard.store.job_edits import JobEdits

# Options that say how much memory a job gets: with another figure, what was learned from its failures is void.
_SIZES = frozenset({"vram", "ram", "exclusive", "gpus"})
# Options whose values may be secrets.
_SECRET = frozenset({"env", "notify"})


class JobEditor:
    """The changes of one request. `fit` fits a submission to this machine, or raises UserError."""

    def __init__(
        self,
        transitions: JobTransitions,
        edits: JobEdits,
        clock: Clock,
        options: dict[str, Any],
        fit: Callable[[Submission], Submission],
    ) -> None:
        self._transitions, self._edits, self._clock = transitions, edits, clock
        self._options, self._fit = options, fit
        self._new_specs: dict[tuple[int, int], tuple[int, Submission]] = {}  # by the old spec and the priority
        self._replaced: set[int] = set()

    def edit(self, job: Job, now: float) -> None:
        if not self._options:
            raise UserError("no option is given to change")
        refuse_pending(job)
        if job.state not in WAITING:
            raise UserError(f"it is {job.state}: only waiting jobs can be edited; `gpuyard resubmit` makes a new one")
        spec_id, submission = self._edited(job)
        new = replace(job, spec=submission.spec, priority=submission.priority)
        self._edits.replace_spec(new, spec_id, drops_growth=not _SIZES.isdisjoint(self._options))
        if "at" in self._options:
            self._set_start(new, now)
        self._transitions.store.add_event(job.id, now, "edited", self._text())
        self._transitions.estimates.clear_cache()

    def finish(self) -> None:
        """Delete the specs that no job has any more. Call it in a transaction."""
        self._edits.delete_unused_specs(self._replaced)

    def _edited(self, job: Job) -> tuple[int, Submission]:
        before = self._edits.spec_of(job.id)
        key = before, job.priority
        if key not in self._new_specs:
            submission = self._fit(edited(job, self._options))
            self._new_specs[key] = self._edits.add_spec(submission.spec), submission
            self._replaced.add(before)
        return self._new_specs[key]

    def _set_start(self, job: Job, now: float) -> None:
        """Set the earliest start. A queued job is delayed until then, and a delayed one starts now if there is none."""
        at = self._options["at"]
        not_before = None if at is None else read_start_time(at, self._clock)
        if job.state is JobState.DELAYED and (not_before is None or not_before <= now):
            self._transitions.apply(job, JobEvent.DUE, now)
            self._edits.set_start(job.id, None)
            return
        self._edits.set_start(job.id, not_before)
        if job.state is JobState.QUEUED and not_before is not None and not_before > now:
            self._transitions.apply(replace(job, not_before=not_before), JobEvent.DELAY, now)

    def _text(self) -> str:
        return ", ".join(_option_text(name, value) for name, value in self._options.items())


def _option_text(name: str, value: Any) -> str:
    if value is None:
        return f"no --{name}"
    if name == "at" and str(value).startswith("+"):
        return f"--in {format_duration(parse_duration(str(value)[1:]))}"
    return f"--{name}" if value is True or name in _SECRET else f"--{name} {value}"
