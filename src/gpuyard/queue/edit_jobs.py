"""Fits submissions to this machine, and changes the options of jobs that wait: others keep their own."""

from collections.abc import Callable, Collection
from typing import Any

from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ledger.measured_usage import LEASE_VARIABLE
from gpuyard.model.job import Job
from gpuyard.model.lease import FixedMemory, Need, WholeDevice
from gpuyard.model.lifecycle import WAITING, JobEvent, JobState
from gpuyard.model.machine_snapshot import Snapshot, Vendor
from gpuyard.model.resubmit import edited
from gpuyard.model.submission import Submission
from gpuyard.model.units import format_duration, parse_duration
from gpuyard.policy.device_names import check_possible, choose_vendor, find_devices, refuse_while_silent, silent_probe
from gpuyard.policy.device_state import capacity
from gpuyard.ports import Clock
from gpuyard.queue.add_submission import read_start_time
from gpuyard.queue.transitions import JobTransitions
from gpuyard.queue.user_requests import refuse_pending
from gpuyard.store.queue_queries import JobEdits
from gpuyard.visible_devices import named_visible


def fit_to_machine(
    submission: Submission,
    snapshot: Snapshot,
    banned: tuple[str, ...],
    vendor: Vendor | None = None,
    plugged: Collection[Vendor] = (),
) -> Submission:
    """Return the submission with device ids in place of names, and with the vendor of its devices if the machine has
    several. `vendor` is the configured one, `plugged` are those with a GPU on the PCI bus. Raises UserError if this
    machine can never run it, and EnvironmentFault if none of its devices can be used now. While a probe does not
    answer, a job that names no device is taken as it is: it waits until the driver recovers."""
    need = submission.spec.need
    if submission.spec.engine:
        return submission
    is_named = submission.devices is not None
    if not need.devices:
        if is_named:
            refuse_while_silent(need.vendor, snapshot)
        need = replace(need, only=_selected_devices(submission, snapshot) if is_named else None, banned=banned)
        return replace(submission, spec=replace(submission.spec, need=need))
    silent = silent_probe(need.vendor or (None if is_named else vendor), snapshot)
    has_none = not snapshot.usable_devices() and (silent is None or silent.vendor not in plugged)
    if submission.devices_are_optional and has_none:
        without = replace(submission.spec, need=Need(devices=0, host=need.host), sees_all_devices=True)
        return replace(submission, spec=without)
    if silent is not None:
        if is_named or _own_variable(submission) is not None:
            refuse_while_silent(silent.vendor, snapshot)
        wanted = need.vendor or vendor or (silent.vendor if snapshot.usable_devices() else None)
        need = replace(need, banned=banned, vendor=wanted)
        return replace(submission, spec=replace(submission.spec, need=need))
    known = snapshot.unsplit_devices()
    if known and not snapshot.usable_devices():  # the driver or a limit of the daemon: they may be back in a moment
        fault = known[0].fault or "unknown"
        raise EnvironmentFault(
            f"no GPU can be used now; {known[0].id}: {fault}", hint="`gpuyard doctor` says more; then submit again"
        )
    need = replace(need, only=_selected_devices(submission, snapshot))
    devices = [each for each in snapshot.usable_devices() if need.only is None or each.id in need.only]
    need, suitable = choose_vendor(need, devices, snapshot, banned=banned, preferred=vendor, names_devices=is_named)
    if not known:
        option = "--gpus 0" if submission.spec.task is None else "`scheduler: {gpus: 0}` in its YAML"
        raise UserError(
            "there is no usable GPU", hint=f"`gpuyard doctor` says why; {option} runs without a GPU", code="impossible"
        )
    has_sizes = any(capacity(device) is not None for device in suitable)
    if submission.spec.pace is not None and isinstance(need.memory, FixedMemory) and not has_sizes:
        need = replace(need, memory=WholeDevice())  # a device of unknown size cannot be shared
    check_possible(need, suitable, snapshot)
    return replace(submission, spec=replace(submission.spec, need=need))


def _selected_devices(submission: Submission, snapshot: Snapshot) -> tuple[str, ...] | None:
    """Return the ids of the requested devices; else those in the user's own CUDA_VISIBLE_DEVICES; None for any."""
    if submission.devices is not None:
        return tuple(dict.fromkeys(find_devices(submission.devices, snapshot, submission.spec.need.vendor)))
    visible = _own_variable(submission)
    return None if visible is None else tuple(device.id for device in named_visible(visible, snapshot))


def _own_variable(submission: Submission) -> str | None:
    """Return the user's own CUDA_VISIBLE_DEVICES: for a job that submits another, gpuyard has set it."""
    environment = submission.spec.environment
    return None if LEASE_VARIABLE in environment else environment.get("CUDA_VISIBLE_DEVICES")


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
        before = self._edits.spec_of(job.id)
        key = before, job.priority
        if key not in self._new_specs:
            submission = self._fit(edited(job, self._options))
            self._new_specs[key] = self._edits.add_spec(submission.spec), submission
            self._replaced.add(before)
        spec_id, submission = self._new_specs[key]
        new = replace(job, spec=submission.spec, priority=submission.priority)
        # With other sizes, what was learned from the job's failures is void.
        drops_growth = not self._options.keys().isdisjoint(("vram", "ram", "exclusive", "gpus"))
        self._edits.replace_spec(new, spec_id, drops_growth=drops_growth)
        if "at" in self._options:
            self._set_start(new, now)
        text = ", ".join(_option_text(name, value) for name, value in self._options.items())
        self._transitions.store.add_event(job.id, now, "edited", text)
        self._transitions.estimates.clear_cache()

    def finish(self) -> None:
        """Delete the specs that no job has any more. Call it in a transaction."""
        self._edits.delete_unused_specs(self._replaced)

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


def _option_text(name: str, value: Any) -> str:
    if value is None:
        return f"no --{name}"
    if name == "at" and str(value).startswith("+"):
        return f"--in {format_duration(parse_duration(str(value)[1:]))}"
    may_be_secret = name in {"env", "notify"}
    return f"--{name}" if value is True or may_be_secret else f"--{name} {value}"
