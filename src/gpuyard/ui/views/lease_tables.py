"""Leases as people see them: who holds what, who waits and why, and who uses a device without a lease."""

import time
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from gpuyard.core.lease import Lease, Need
from gpuyard.core.snapshot import Device
from gpuyard.core.units import UNKNOWN, format_duration, format_size
from gpuyard.ledger_status import LedgerStatus, WaitingTicket
from gpuyard.probes.common.process_info import ProcessInfo
from gpuyard.ui.views.device_tables import device_label, text_table

Idle = Mapping[tuple[str, int], float]


def standing_view(
    standing: LedgerStatus, out: Console, people: Mapping[int, ProcessInfo], idle: Idle
) -> RenderableType:
    parts: list[RenderableType] = []
    if standing.leases:
        parts.append(text_table([_lease_row(lease, standing) for lease in standing.leases], out))
    else:
        parts.append(Text("Nobody holds a lease."))
    parts += [Text(_waiting_line(waiting, standing)) for waiting in standing.waiting]
    rows = [
        {
            "without a lease": _label(stranger.device_id, standing.snapshot.devices),
            "pid": str(stranger.process.pid),
            "user": people.get(stranger.process.pid, ProcessInfo()).user or UNKNOWN,
            "memory": format_size(stranger.process.memory_mb),
            "idle": format_duration(idle.get((stranger.device_id, stranger.process.pid))),
            "command": people.get(stranger.process.pid, ProcessInfo()).command or stranger.process.name or UNKNOWN,
        }
        for stranger in standing.strangers
    ]
    if rows:
        parts += [Text(""), text_table(rows, out)]
    return Group(*parts)


def need_text(need: Need) -> str:
    devices = f"{need.devices} GPU{'' if need.devices == 1 else 's'}"
    if need.memory_mb is None:
        return devices
    return f"{devices} with {format_size(need.memory_mb)}{' free' if need.is_exclusive else ''}"


def _lease_row(lease: Lease, standing: LedgerStatus) -> dict[str, str]:
    measured = [standing.measured.get((lease.id, share.device_id)) for share in lease.shares]
    reserved = [share.memory_mb for share in lease.shares]
    is_exclusive = any(share.is_exclusive for share in lease.shares)
    return {
        "lease": lease.id,
        "gpus": ",".join(_label(share.device_id, standing.snapshot.devices) for share in lease.shares),
        "user": lease.holder.user,
        "pid": str(lease.holder.pid),
        "since": format_duration(time.time() - lease.since),
        "reserved": "alone" if is_exclusive else format_size(_total(reserved)),
        "measured": format_size(_total(measured)),
        "label": lease.holder.label or UNKNOWN,
    }


def _waiting_line(waiting: WaitingTicket, standing: LedgerStatus) -> str:
    ticket = waiting.ticket
    label = f" ({ticket.holder.label})" if ticket.holder.label else ""
    why = "; ".join(
        f"{_label(reason.device_id, standing.snapshot.devices)}: {reason.text}" if reason.device_id else reason.text
        for reason in waiting.reasons
    )
    waited = format_duration(time.time() - ticket.since)
    asked = need_text(ticket.need)
    return (
        f"waiting {waited}: {ticket.holder.user}, pid {ticket.holder.pid}{label} for {asked}: {why or 'about to start'}"
    )


def _label(device_id: str | None, devices: Sequence[Device]) -> str:
    found = next((device for device in devices if device.id == device_id), None)
    return device_label(found, devices) if found else str(device_id)


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
