"""The state of the ledger: leases, waiting processes with reasons, processes without a lease, and ignored records."""

import time
from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.config import CurrentBans, load_config
from gpuyard.core.lease import Lease, Ticket
from gpuyard.core.memory.declared_ram import host_closed_reason, ram_figures
from gpuyard.core.scheduling.choose_devices import choose
from gpuyard.core.scheduling.closed_devices import closed_devices
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.host_capacity import HostReserved, HostState, HostUse, HostView, sum_reserved
from gpuyard.core.scheduling.machine import Machine
from gpuyard.core.scheduling.placement import in_queue_order
from gpuyard.core.scheduling.wait_reasons import Reason
from gpuyard.core.snapshot import Process, Snapshot
from gpuyard.leases.active_tickets import active_tickets
from gpuyard.leases.foreign_load_tracker import ForeignLoadTracker
from gpuyard.leases.host_usage import HostMeter
from gpuyard.leases.ledger import Ledger
from gpuyard.leases.measured_usage import LeaseFinder, measure
from gpuyard.leases.records import BadRecord
from gpuyard.system.machine_identity import machine_name


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
    """Return what all leases reserve of the host's RAM and CPUs."""
    leases = ledger.leases()
    view = HostView(limits=load_config().host.limits, used=HostMeter().use_of(leases), machine=machine_name())
    return sum_reserved(HostState.of_leases(snapshot.host, view, leases))


def read_ledger_status(ledger: Ledger, snapshot: Snapshot, max_foreign_load_percent: float | None) -> LedgerStatus:
    contents = ledger.contents()
    leases, tickets = contents.leases, in_queue_order(contents.tickets)
    host = HostView(limits=load_config().host.limits, used=HostMeter().use_of(leases), machine=machine_name())
    view = Machine(
        now=time.time(),
        snapshot=snapshot,
        leases=leases,
        measured=measure(snapshot, leases),
        foreign=ForeignLoadTracker().update(snapshot, leases, 0.0, max_foreign_load_percent),
        packing=Packing(max_foreign_load_percent=max_foreign_load_percent),
        host=host,
        closed=closed_devices(snapshot, contents.drains, CurrentBans().ids(snapshot), contents.health_marks),
    )
    return LedgerStatus(
        snapshot=snapshot,
        leases=leases,
        measured=view.measured,
        waiting=tuple(_waiting(tickets, view)),
        foreign_uses=tuple(_foreign_uses(snapshot, leases)),
        bad=contents.bad,
        host_used=host.used,
    )


def _waiting(order: list[Ticket], view: Machine) -> Iterator[WaitingTicket]:
    figures = ram_figures(view.snapshot.host, view.host.limits.keep_free_mb)
    closed = () if figures is None or figures[0] >= figures[1] else (host_closed_reason(*figures),)
    for position, ticket in enumerate(order):
        ahead = tuple(active_tickets(order[:position]))
        reasons = closed or choose(ticket.need, replace(view, ahead=ahead)).reasons
        yield WaitingTicket(ticket=ticket, reasons=reasons)


def _foreign_uses(snapshot: Snapshot, leases: tuple[Lease, ...]) -> Iterator[ForeignUse]:
    for device in snapshot.devices:
        finder = LeaseFinder([lease for lease in leases if lease.on(device.id)])
        for process in device.processes or ():
            if not finder.find(process.pid):
                yield ForeignUse(device_id=device.id, process=process)
