"""The machine as lines for people: host, problems, a row per device, the processes that use the devices, how the
devices are linked; and the ledger: leases, waiting tickets and why they wait, and processes without a lease.

All pure, and fitted to a width: at 80 columns all figures fit, more width goes to names and bars, and with less the
least needed columns are dropped. Unknown is a dash, never a zero."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from gpuyard.ledger.ledger_status import LedgerStatus, WaitingTicket
from gpuyard.ledger.records import BadRecord
from gpuyard.model.lease import HostShare, Lease, Need
from gpuyard.model.machine_snapshot import Device, Host, Problem, Snapshot, Vendor
from gpuyard.model.topology import link_text
from gpuyard.model.units import UNKNOWN, format_count, format_duration, format_gigabytes, format_size
from gpuyard.policy.host_room import HostUse, format_cpus
from gpuyard.probes.devices_and_processes import ProcessInfo
from gpuyard.ui.cli.text_table import GAP, Column, Line, cell_width, join_cells, lay_out, lay_out_lines, make_columns
from gpuyard.ui.views import Frame, bar, sparkline

T = TypeVar("T")
_BAR, _SPARKLINE = 2, 5
_DEVICE_COLUMNS = make_columns(
    "#", "device", "", "memory", "use", "", "power", "temp", "procs",
    right=("memory", "use", "power", "temp", "procs"), long=("device",), spare=("", "power", "temp", "procs"),
)  # fmt: skip
_PROCESS_COLUMNS = make_columns("#", "pid", "user", "memory", "command", right=("pid", "memory"), long=("command",))


def snapshot_lines(
    snapshot: Snapshot,
    frame: Frame,
    *,
    expected: Collection[Vendor] = (),
    history: Mapping[str, list[float | None]] | None = None,
    processes: Mapping[int, ProcessInfo] | None = None,
) -> list[Line]:
    """Return the lines; rows beyond the frame's height are only counted. `expected` are the vendors of the GPUs on the
    PCI bus, `history` is each device's recent utilisation, and `processes` describes processes by pid; None shows no
    process table."""
    problems = relevant_problems(snapshot, expected)
    lines: list[Line] = [((host_line(snapshot.host), "bold"),)] if snapshot.host.name else []
    lines += [(("! ", "yellow"), (str(problem), None)) for problem in problems]
    if not snapshot.devices:
        is_late = any(problem.kind == "timeout" for problem in problems)
        found = "No GPU answered in time." if is_late else "No GPU found."
        return [*lines, ((f"{found} `gpuyard doctor` shows what was tried.", None),)]
    height = None if frame.height is None else max(2, frame.height - len(lines) - 2)
    devices, more = _first(snapshot.devices, height)
    lines += _device_table(devices, snapshot, frame, history)
    lines += _more_line(more, "device")
    if processes is not None and not more:
        left = None if height is None else height - len(devices) - 2
        lines += _process_table(snapshot, processes, frame, left)
    return lines


def relevant_problems(snapshot: Snapshot, expected: Collection[Vendor]) -> list[Problem]:
    """Leave out tools that are not installed, unless a GPU of their vendor is plugged in and no probe reads it."""
    seen = {device.vendor for device in snapshot.devices}
    return [
        problem
        for problem in snapshot.problems
        if problem.kind != "missing" or (problem.vendor in expected and problem.vendor not in seen)
    ]


def host_line(host: Host) -> str:
    facts = [host.name or "this host"]
    if host.cpu_count is not None:
        facts.append(f"{host.cpu_count:g} CPUs {figure_text(host.cpu_percent, '%')}")
    if host.memory_total_mb is not None:
        facts.append(f"RAM {memory_text(host.memory_used_mb, host.memory_total_mb)}")
    if host.load_1m is not None:
        facts.append(f"load {host.load_1m:.1f}")
    if host.limited_by:
        facts.append(f"limited by {host.limited_by}")
    return GAP.join(facts)


def figure_text(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def memory_text(used_mb: float | None, total_mb: float | None, used_at_least_mb: float | None = None) -> str:
    if used_mb is None and used_at_least_mb:
        return f">={format_gigabytes(used_at_least_mb)}/{format_gigabytes(total_mb)} GB"
    if used_mb is None and total_mb is None:
        return UNKNOWN
    return f"{format_gigabytes(used_mb)}/{format_gigabytes(total_mb)} GB"


def power_text(draw_w: float | None, limit_w: float | None) -> str:
    if draw_w is None and limit_w is None:
        return UNKNOWN
    draw = figure_text(draw_w, "")
    return f"{draw} W" if limit_w is None else f"{draw}/{limit_w:.0f} W"


def _device_table(
    shown: Sequence[Device], snapshot: Snapshot, frame: Frame, history: Mapping[str, list[float | None]] | None
) -> list[Line]:
    rows = [
        [
            snapshot.labels.get(device.id, "?"),
            ("" if device.healthy else "unhealthy: ") + ("  " if device.parent else "") + (device.name or device.id),
            memory_text(device.memory_used_mb, device.memory_total_mb, device.memory_used_at_least_mb),
            figure_text(device.utilization_percent, "%"),
            power_text(device.power_draw_w, device.power_limit_w),
            figure_text(device.temperature_c, "°C"),
            UNKNOWN if device.processes is None else str(len(device.processes)),
        ]
        for device in shown
    ]
    columns = list(_DEVICE_COLUMNS)
    if history is None:
        del columns[_SPARKLINE]
    headings = [column.heading for column in columns if column.heading]
    charts = len(columns) - len(headings)
    used = sum(max(map(cell_width, texts)) for texts in zip(headings, *rows, strict=True))
    spare = (frame.columns - used - len(GAP) * (len(columns) - 1)) // charts
    width = max(4, min(24, spare))
    styles: list[dict[str, str | None]] = []
    for device, row in zip(shown, rows, strict=True):
        share = (device.memory_used_mb or 0.0) / (device.memory_total_mb or 1.0)
        is_known = device.memory_used_mb is not None and device.memory_total_mb
        row.insert(_BAR, "".join(bar(share, width)) if is_known else UNKNOWN)
        if history is not None:
            row.insert(_SPARKLINE, sparkline(history.get(device.id, [])[-width:], 100.0).rjust(width))
        by_use: dict[str, str | None] = {"memory": "green" if share < 0.7 else "yellow" if share < 0.9 else "red"}
        styles.append(by_use if device.healthy else {column.heading: "red" for column in columns})
    return lay_out_lines(columns, rows, frame.width, styles=styles)


def _process_table(
    snapshot: Snapshot, known: Mapping[int, ProcessInfo], frame: Frame, height: int | None
) -> list[Line]:
    """Return the processes of each device, those with the most memory first."""
    rows = [
        [
            snapshot.labels.get(device.id, "?"),
            str(process.pid),
            known.get(process.pid, ProcessInfo()).user or UNKNOWN,
            format_size(process.memory_mb),
            known.get(process.pid, ProcessInfo()).command or process.name or UNKNOWN,
        ]
        for device in snapshot.devices
        for process in sorted(device.processes or (), key=lambda process: -(process.memory_mb or 0.0))
    ]
    shown, more = _first(rows, height)
    lines = lay_out_lines(_PROCESS_COLUMNS, shown, frame.width)
    return [(), *lines, *_more_line(more, "process")] if shown else []


def _first(rows: Sequence[T], height: int | None) -> tuple[Sequence[T], int]:
    """Return the rows that fit and the number of the others; one line is left for that number."""
    if height is None or len(rows) <= height:
        return rows, 0
    shown = rows[: max(0, height - 1)]
    return shown, len(rows) - len(shown)


def _more_line(more: int, what: str) -> list[Line]:
    plural = "" if more == 1 else "es" if what.endswith("s") else "s"
    return [((f"and {more} more {what}{plural}: enlarge the window to see them", "dim"),)] if more else []


_MEANINGS = {
    "NV": "NVLink, and how many",
    "XGMI": "AMD's own link",
    "switch": "a PCIe switch",
    "bridge": "a PCIe host bridge",
    "node": "a NUMA node",
    "across": "across NUMA nodes",
    "?": "unknown",
}


def topology_lines(snapshot: Snapshot) -> list[str]:
    """Return a row for each GPU: its NUMA node, and the best that it shares with each other; then what words mean."""
    devices, topology = snapshot.unsplit_devices(), snapshot.topology
    if not devices:
        return ["No GPU found. `gpuyard doctor` shows what was tried."]
    labels = [snapshot.label(device.id) for device in devices]
    texts = [
        ["X" if one is other else link_text(topology.link(one.id, other.id)) for other in devices] for one in devices
    ]
    nodes = [topology.nodes.get(device.id) for device in devices]
    rows = [
        (f"GPU {label}", UNKNOWN if node is None else str(node), *cells)
        for label, node, cells in zip(labels, nodes, texts, strict=True)
    ]
    columns = [Column(""), Column("node", is_right=True), *map(Column, labels)]
    words = {cell.rstrip("0123456789") for cells in texts for cell in cells}
    meanings = [f"{word}: {meaning}" for word, meaning in _MEANINGS.items() if word in words]
    lines = [join_cells(line) for line in lay_out(columns, rows, None)]
    return [*lines, *(["", "; ".join(meanings)] if meanings else [])]


_LEASES = make_columns(
    "lease", "gpus", "user", "pid", "since", "reserved", "measured", "ram", "cpus", "label",
    right=("pid", "since", "reserved", "measured", "ram", "cpus"), long=("label",),
)  # fmt: skip
_FOREIGN = make_columns(
    "without a lease", "pid", "user", "memory", "idle", "command", right=("pid", "memory", "idle"), long=("command",)
)


def lease_lines(
    status: LedgerStatus, frame: Frame, processes: Mapping[int, ProcessInfo], idle_s: Mapping[tuple[str, int], float]
) -> list[Line]:
    """Return the lines; `idle_s` is how long each process has left its device idle, by device id and pid."""
    lines: list[Line] = [(("No leases.", None),)]
    if status.leases:
        # Without the columns of RAM and CPUs where no lease has them.
        shown = [at for at in range(len(_LEASES)) if at not in (7, 8) or any(lease.host for lease in status.leases)]
        rows = [[row[at] for at in shown] for row in (_lease_row(lease, status) for lease in status.leases)]
        lines = lay_out_lines([_LEASES[at] for at in shown], rows, frame.width)
    lines += [((_waiting_line(waiting, status), None),) for waiting in status.waiting]
    lines += [(("! ", "yellow"), (text, None)) for text in ignored_texts(status.bad)]
    rows = [
        [
            status.snapshot.label(use.device_id),
            str(use.process.pid),
            processes.get(use.process.pid, ProcessInfo()).user or UNKNOWN,
            format_size(use.process.memory_mb),
            format_duration(idle_s.get((use.device_id, use.process.pid))),
            processes.get(use.process.pid, ProcessInfo()).command or use.process.name or UNKNOWN,
        ]
        for use in status.foreign_uses
    ]
    return [*lines, (), *lay_out_lines(_FOREIGN, rows, frame.width)] if rows else lines


def ignored_texts(bad: Sequence[BadRecord]) -> list[str]:
    if not bad:
        return []
    more = f"and {len(bad) - 10} more files are ignored; `gpuyard leases --json` lists them"
    remedy = "holds no GPU and no place in the queue; its user, or the lease directory's owner, can remove it"
    return [*map(str, bad[:10]), *([more] if len(bad) > 10 else []), f"an ignored file {remedy}"]


def _need_text(need: Need) -> str:
    devices = format_count(need.devices, "GPU" if need.vendor is None else f"{need.vendor} GPU")
    if need.required_mb is not None:
        devices += f" with {format_size(need.required_mb)}{' free' if need.is_exclusive else ''}"
    parts = [devices] if need.devices or need.host is None else []
    parts += [] if need.ram_mb is None else [f"{format_size(need.ram_mb)} of RAM"]
    parts += [] if need.cpus is None else [format_cpus(need.cpus)]
    return " and ".join(parts)


def _lease_row(lease: Lease, status: LedgerStatus) -> list[str]:
    share = lease.host or HostShare()
    used = None  # of its RAM
    if share.ram_mb is not None:
        used = status.host_used.get(lease.id, HostUse(ram_mb=share.used_mb)).ram_mb
    is_exclusive = any(each.is_exclusive for each in lease.shares)
    return [
        lease.id,
        ",".join(status.snapshot.label(each.device_id) for each in lease.shares) or UNKNOWN,
        lease.holder.user,
        str(lease.holder.pid),
        format_duration(time.time() - lease.since),
        "alone" if is_exclusive else format_size(_total([each.memory_mb for each in lease.shares])),
        format_size(_total([status.measured.get((lease.id, each.device_id)) for each in lease.shares])),
        f"{'' if used is None else f'{format_size(used)} of '}{format_size(share.ram_mb)}",
        UNKNOWN if share.cpus is None else f"{share.cpus:g}",
        lease.holder.label or UNKNOWN,
    ]


def _waiting_line(waiting: WaitingTicket, status: LedgerStatus) -> str:
    holder = waiting.ticket.holder
    label = f" ({holder.label})" if holder.label else ""
    reasons = "; ".join(
        f"GPU {status.snapshot.label(reason.device_id)}: {reason.text}" if reason.device_id else reason.text
        for reason in waiting.reasons
    )
    waited, need = format_duration(time.time() - waiting.ticket.since), _need_text(waiting.ticket.need)
    return f"waiting {waited}: {holder.user}, pid {holder.pid}{label} for {need}: {reasons or 'about to start'}"


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
