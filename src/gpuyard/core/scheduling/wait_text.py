"""Describe in one line what a request waits for."""

from collections.abc import Mapping, Sequence

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind


def relevant_reasons(need: Need, reasons: Sequence[Reason]) -> list[Reason]:
    """Return the reasons that concern the machine or a requested device, without the count of devices."""
    return [
        reason
        for reason in reasons
        if (reason.device_id is None or reason.device_id in (need.only or ())) and reason.kind is not ReasonKind.TOO_FEW
    ]


def describe_devices(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}" if count else "the machine"


def describe_wait(need: Need, reasons: Sequence[Reason], names: Mapping[str, str]) -> str:
    """Return what the request waits for and why. `names` maps device ids to short names: {"GPU-17ab": "0"}."""
    places: dict[str, list[str]] = {}
    for reason in reasons:
        places.setdefault(reason.text, []).append(names.get(reason.device_id or "", reason.device_id or ""))
    why = "; ".join(f"GPU {', '.join(at)}: {text}" if any(at) else text for text, at in places.items())
    return f"waiting for {describe_devices(need.devices)}: {why}"
