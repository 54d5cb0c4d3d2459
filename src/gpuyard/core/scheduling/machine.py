"""The devices and the host as placement sees them. Scripts place their own needs on it, and know no jobs."""

from collections.abc import Mapping

from msgspec import Struct

from gpuyard.core.lease import Lease, Ticket
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.foreign_load import ForeignLoad
from gpuyard.core.scheduling.host_capacity import HostView
from gpuyard.core.scheduling.wait_reasons import Reason
from gpuyard.core.snapshot import Snapshot


class Machine(Struct, frozen=True, kw_only=True):
    """The devices and the host, the leases on them, and what was measured of these."""

    now: float
    snapshot: Snapshot
    leases: tuple[Lease, ...] = ()
    measured: Mapping[tuple[str, str], float | None] = {}  # MB that its processes hold, by (lease id, device id)
    loads: Mapping[str, float | None] = {}  # the smoothed measured load of each device
    foreign: Mapping[str, ForeignLoad] = {}  # the foreign load of each device
    packing: Packing = Packing()
    lease_loads: Mapping[str, float] = {}  # measured load of leases whose shares do not know it
    closed: Mapping[str, Reason] = {}  # why nothing new starts on a device (`closed_devices`)
    ahead: tuple[Ticket, ...] = ()  # the tickets ahead of the request, in queue order
    host: HostView = HostView()  # limits and measured use of RAM and CPUs
