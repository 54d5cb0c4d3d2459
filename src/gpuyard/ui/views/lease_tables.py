"""The ledger as lines for people: leases, waiting tickets and why they wait, and processes without a lease."""

import time
from collections.abc import Mapping, Sequence

from gpuyard.core.lease import HostShare, Lease, Need
from gpuyard.core.scheduling.host_capacity import HostUse, format_cpus
from gpuyard.core.units import UNKNOWN, format_count, format_duration, format_size
from gpuyard.leases.records import BadRecord
from gpuyard.ledger_status import LedgerStatus, WaitingTicket
from gpuyard.probes.common.process_info import ProcessInfo
from gpuyard.ui.cli.text_table import Line, make_columns
from gpuyard.ui.views import Frame
from gpuyard.ui.views.device_tables import table_lines

_LEASES = make_columns(
    "lease", "gpus", "user", "pid", "since", "reserved", "measured", "label",
    right=("pid", "since", "reserved", "measured"), long=("label",),
)  # fmt: skip
_WITH_RAM = make_columns(
    "lease", "gpus", "user", "pid", "since", "reserved", "measured", "ram", "cpus", "label",
    right=("pid", "since", "reserved", "measured", "ram", "cpus"), long=("label",),
)  # fmt: skip
_MOST_IGNORED = 10
_REMEDY = (
    "an ignored file holds no GPU and no place in the queue; its user, or the lease directory's owner, can remove it"
)
_FOREIGN = make_columns(
    "without a lease", "pid", "user", "memory", "idle", "command", right=("pid", "memory", "idle"), long=("command",)
)


def lease_lines(
    status: LedgerStatus, frame: Frame, processes: Mapping[int, ProcessInfo], idle_s: Mapping[tuple[str, int], float]
) -> list[Line]:
    """Return the lines; `idle_s` is how long each process has left its device idle, by device id and pid."""
    lines: list[Line] = [(("No leases.", None),)]
    if status.leases:
        has_ram = any(lease.host is not None for lease in status.leases)
        rows = [_lease_row(lease, status, has_ram=has_ram) for lease in status.leases]
        lines = table_lines(_WITH_RAM if has_ram else _LEASES, rows, frame)
    lines += [((_waiting_line(waiting, status), None),) for waiting in status.waiting]
    lines += [(("! ", "yellow"), (text, None)) for text in ignored_texts(status.bad)]
    rows = [
        [
            _label(use.device_id, status),
            str(use.process.pid),
            processes.get(use.process.pid, ProcessInfo()).user or UNKNOWN,
            format_size(use.process.memory_mb),
            format_duration(idle_s.get((use.device_id, use.process.pid))),
            processes.get(use.process.pid, ProcessInfo()).command or use.process.name or UNKNOWN,
        ]
        for use in status.foreign_uses
    ]
    return [*lines, (), *table_lines(_FOREIGN, rows, frame)] if rows else lines


def ignored_texts(bad: Sequence[BadRecord]) -> list[str]:
    lines = [str(record) for record in bad[:_MOST_IGNORED]]
    if len(bad) > _MOST_IGNORED:
        lines.append(f"and {len(bad) - _MOST_IGNORED} more files are ignored; `gpuyard leases --json` lists them")
    return [*lines, _REMEDY] if lines else []


def _need_text(need: Need) -> str:
    devices = format_count(need.devices, "GPU" if need.vendor is None else f"{need.vendor} GPU")
    if need.required_mb is not None:
        devices += f" with {format_size(need.required_mb)}{' free' if need.is_exclusive else ''}"
    parts = [devices] if need.devices or need.host is None else []
    parts += [] if need.ram_mb is None else [f"{format_size(need.ram_mb)} of RAM"]
    parts += [] if need.cpus is None else [format_cpus(need.cpus)]
    return " and ".join(parts)


def _lease_row(lease: Lease, status: LedgerStatus, *, has_ram: bool) -> list[str]:
    is_exclusive = any(each.is_exclusive for each in lease.shares)
    share = lease.host or HostShare()
    cpus = UNKNOWN if share.cpus is None else f"{share.cpus:g}"
    used = _host_used_text(lease, status)
    host = [f"{used}{format_size(share.ram_mb)}", cpus] if has_ram else []
    return [
        lease.id,
        ",".join(_label(each.device_id, status) for each in lease.shares) or UNKNOWN,
        lease.holder.user,
        str(lease.holder.pid),
        format_duration(time.time() - lease.since),
        "alone" if is_exclusive else format_size(_total([each.memory_mb for each in lease.shares])),
        format_size(_total([status.measured.get((lease.id, each.device_id)) for each in lease.shares])),
        *host,
        lease.holder.label or UNKNOWN,
    ]


def _host_used_text(lease: Lease, status: LedgerStatus) -> str:
    """Return what the lease uses of its RAM, such as "1.2 of ", where that is known."""
    share = lease.host
    if share is None or share.ram_mb is None:
        return ""
    used = status.host_used.get(lease.id, HostUse(ram_mb=share.used_mb)).ram_mb
    return "" if used is None else f"{format_size(used)} of "


def _waiting_line(waiting: WaitingTicket, status: LedgerStatus) -> str:
    holder = waiting.ticket.holder
    label = f" ({holder.label})" if holder.label else ""
    reasons = "; ".join(
        f"GPU {_label(reason.device_id, status)}: {reason.text}" if reason.device_id else reason.text
        for reason in waiting.reasons
    )
    waited, need = format_duration(time.time() - waiting.ticket.since), _need_text(waiting.ticket.need)
    return f"waiting {waited}: {holder.user}, pid {holder.pid}{label} for {need}: {reasons or 'about to start'}"


def _label(device_id: str, status: LedgerStatus) -> str:
    return status.snapshot.labels.get(device_id, device_id)


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
