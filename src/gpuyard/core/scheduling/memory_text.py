"""Where the memory of a device is: used, by whom, and kept for whom, for a job that it has too little for.

Used memory is measured. Kept memory is free now, and promised: to a lease that has not taken all it reserved, to a
request ahead in the queue, or to first runs, which may take more than is expected of them.
"""

from collections.abc import Iterator, Sequence

from gpuyard.core.lease import Holder
from gpuyard.core.scheduling.device_memory import DeviceState, PromisedShare, charged_mb
from gpuyard.core.scheduling.wait_reasons import list_holders
from gpuyard.core.units import format_size

# Less than this is not worth a word.
_LEAST_MB = 1.0


def describe_memory(state: DeviceState) -> str:
    """Return where the memory went that is not free, such as `6 GB used by job 3, 2 GB kept for job 9, ahead in the
    queue`; an empty text if all is free or the size of the device is unknown."""
    if state.memory_text is None:
        state.memory_text = "" if state.capacity_mb is None else ", ".join(_parts(state, state.capacity_mb))
    return state.memory_text


def _parts(state: DeviceState, capacity_mb: float) -> Iterator[str]:
    leases = [each for each in state.promises if not each.is_reservation]
    ahead = [each for each in state.promises if each.is_reservation]
    users = [each for each in leases if (each.measured_mb or 0.0) >= _LEAST_MB]
    if users:
        yield f"{format_size(sum(each.measured_mb or 0.0 for each in users))} used by {_names(users)}"
    if state.foreign_mb >= _LEAST_MB:
        yield f"{format_size(state.foreign_mb)} used by processes outside gpuyard"
    kept = [each for each in leases if _kept_mb(each, capacity_mb) >= _LEAST_MB]
    if kept:
        more, whom = ("more ", "them") if _holders(kept) == _holders(users) else ("", _names(kept))
        whom = "it" if whom == "them" and len(kept) == 1 else whom
        yield f"{format_size(sum(_kept_mb(each, capacity_mb) for each in kept))} {more}kept for {whom}"
    if ahead:
        reserved_mb = sum(charged_mb(each, capacity_mb) for each in ahead)
        yield f"{format_size(reserved_mb)} kept for {_names(ahead)}, ahead in the queue"
    if state.margin_mb >= _LEAST_MB:
        yield f"{format_size(state.margin_mb)} kept in case first runs take more"


def _kept_mb(promise: PromisedShare, capacity_mb: float) -> float:
    """Return what a lease reserves beyond its use. All of it is kept where the driver hides what is used."""
    return charged_mb(promise, capacity_mb) - (promise.measured_mb or 0.0)


def _holders(promises: Sequence[PromisedShare]) -> list[Holder]:
    return [each.holder for each in promises]


def _names(promises: Sequence[PromisedShare]) -> str:
    return list_holders(_holders(promises))
