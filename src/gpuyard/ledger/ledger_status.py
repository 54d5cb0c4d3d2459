"""The state of the ledger: leases, waiting processes with reasons, processes without a lease, and ignored records; and
a warning if a program beside the queue holds more RAM than it declared (rules: `policy/declared_ram.py`).

`gpuyard run` measures its program every 2 s. A script with `ram=` is measured when it releases its lease: a thread of
ours in it would disturb programs that fork."""

import os
import time
from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.config import CurrentBans, load_config
from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.measured_usage import ForeignLoadTracker, HostMeter, LeaseFinder, measure
from gpuyard.ledger.records import BadRecord, active_tickets
from gpuyard.model.lease import Lease, Ticket
from gpuyard.model.machine_snapshot import Process, Snapshot
from gpuyard.policy.device_health import closed_devices
from gpuyard.policy.host_room import HostReserved, HostState, HostUse, HostView, sum_reserved
from gpuyard.policy.machine import Machine, Packing
from gpuyard.policy.memory_guards import HeldRam, RamWarnings, host_closed_reason, judge_held_ram, ram_figures
from gpuyard.policy.placement import choose, in_queue_order
from gpuyard.policy.wait_reasons import Reason
from gpuyard.probes.local_machine import local_host
from gpuyard.probes.machine_reader import HostProbe
from gpuyard.system.processes import machine_name


class ProgramRamWatch:
    """The program of a `gpuyard run`. `write` gets the warnings."""

    def __init__(self, name: str, declared_mb: float | None, write: Callable[[str], None]) -> None:
        self._name, self._declared_mb, self._write = name, declared_mb, write
        self._host: HostProbe | None = None
        self._said = RamWarnings()
        self._measured_at = time.monotonic()

    def measure_if_due(self) -> None:
        """Measure the program if 2 s have passed since the last time, and write a warning if one is due."""
        if time.monotonic() < self._measured_at + 2.0:
            return
        self._measured_at = time.monotonic()
        self._host = self._host or local_host()  # not before: its first reading takes 0.1 s, and many programs end soon
        tree_mb, own_mb = HostMeter().tree_mb(os.getpid())
        if tree_mb is None or own_mb is None:
            return
        figures = ram_figures(self._host.read(), load_config().host.keep_free_mb)
        held_mb = max(0.0, tree_mb - 3 * own_mb)  # `gpuyard run` has two helpers, which are copies of it
        held = HeldRam(name=self._name, held_mb=held_mb, declared_mb=self._declared_mb, option="--ram", figures=figures)
        self._said, line = judge_held_ram(self._said, held)
        if line is not None:
            self._write(f"gpuyard: {line}")


def warn_about_own_ram(name: str, declared_mb: float, write: Callable[[str], None]) -> None:
    """Write a warning if this process and its descendants hold more RAM than it declared with `ram=`."""
    held_mb = HostMeter().tree_mb(os.getpid())[0]
    if held_mb is not None:
        held = HeldRam(name=name, held_mb=held_mb, declared_mb=declared_mb, option="ram=")
        line = judge_held_ram(RamWarnings(), held)[1]
        if line is not None:
            write(f"gpuyard: {line}")


class WaitingTicket(Struct, frozen=True, kw_only=True):
    ticket: Ticket
    reasons: tuple[Reason, ...]


class ForeignUse(Struct, frozen=True, kw_only=True):
    """A process on a device that belongs to no lease there."""

    device_id: str
    process: Process


class LedgerStatus(Struct, frozen=True, kw_only=True):
    snapshot: Snapshot
    leases: tuple[Lease, ...]
    measured: Mapping[tuple[str, str], float | None]
    waiting: tuple[WaitingTicket, ...]
    foreign_uses: tuple[ForeignUse, ...]
    bad: tuple[BadRecord, ...] = ()
    host_used: Mapping[str, HostUse] = {}  # by lease id, where the lease itself does not say it


def read_host_reserved(ledger: Ledger, snapshot: Snapshot) -> HostReserved:
    leases = ledger.leases()
    view = HostView(limits=load_config().host.limits, used=HostMeter().use_of(leases), machine=machine_name())
    return sum_reserved(HostState.of_leases(snapshot.host, view, leases))


def read_ledger_status(ledger: Ledger, snapshot: Snapshot) -> LedgerStatus:
    contents, config = ledger.contents(), load_config()
    leases, most = contents.leases, config.queue.max_foreign_load_percent
    host = HostView(limits=config.host.limits, used=HostMeter().use_of(leases), machine=machine_name())
    view = Machine(
        now=time.time(), snapshot=snapshot, leases=leases, measured=measure(snapshot, leases),
        foreign=ForeignLoadTracker().update(snapshot, leases, 0.0, most),
        packing=Packing(max_foreign_load_percent=most), host=host,
        closed=closed_devices(snapshot, contents.drains, CurrentBans().ids(snapshot), contents.health_marks),
    )  # fmt: skip
    figures = ram_figures(snapshot.host, host.limits.keep_free_mb)
    closed = () if figures is None or figures[0] >= figures[1] else (host_closed_reason(*figures),)
    order, waiting = in_queue_order(contents.tickets), list[WaitingTicket]()
    for position, ticket in enumerate(order):
        ahead = tuple(active_tickets(order[:position]))
        reasons = closed or choose(ticket.need, replace(view, ahead=ahead)).reasons
        waiting.append(WaitingTicket(ticket=ticket, reasons=reasons))
    finders = {device.id: LeaseFinder([each for each in leases if each.on(device.id)]) for device in snapshot.devices}
    foreign_uses = [
        ForeignUse(device_id=device.id, process=process)
        for device in snapshot.devices
        for process in device.processes or ()
        if not finders[device.id].find(process.pid)
    ]
    return LedgerStatus(
        snapshot=snapshot, leases=leases, measured=view.measured, waiting=tuple(waiting),
        foreign_uses=tuple(foreign_uses), bad=contents.bad, host_used=host.used,
    )  # fmt: skip
