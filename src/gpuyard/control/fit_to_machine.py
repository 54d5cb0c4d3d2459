"""Fit a submission to this machine: device ids in place of names, the vendor of its devices, and a refusal of what can
never run here."""

from collections.abc import Collection

from msgspec.structs import replace

from gpuyard.core.device_names import check_possible, choose_vendor, find_devices, refuse_while_silent, silent_probe
from gpuyard.core.job.submission import Submission
from gpuyard.core.lease import FixedMemory, Need, WholeDevice
from gpuyard.core.scheduling.device_memory import capacity
from gpuyard.core.snapshot import Snapshot, Vendor
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.leases.measured_usage import LEASE_VARIABLE
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
    answer, a job that names no device is taken as it is: it waits until the driver recovers. The planner applies the
    bans again at each decision."""
    need = submission.spec.need
    if submission.spec.engine:
        return submission
    is_named = submission.devices is not None
    if not need.devices:
        if is_named:
            refuse_while_silent(need.vendor, snapshot)
        only = _selected_devices(submission, snapshot) if is_named else None
        return replace(submission, spec=replace(submission.spec, need=replace(need, only=only, banned=banned)))
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
    need, suitable = choose_vendor(
        need,
        [each for each in snapshot.usable_devices() if need.only is None or each.id in need.only],
        snapshot,
        banned=banned,
        preferred=vendor,
        names_devices=is_named,
    )
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
