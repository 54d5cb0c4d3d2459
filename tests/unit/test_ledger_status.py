"""What `gpuyard leases` says about processes that wait."""

from pathlib import Path

from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.ledger_mutex import hold_mutex
from gpuyard.ledger.ledger_status import read_ledger_status
from gpuyard.model.lease import Need
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from tests.unit.ledger import DEADLINE_S, ME


def test_below_the_floor_the_ram_of_the_machine_is_what_processes_wait_for(tmp_path: Path) -> None:
    """Of 24 GB, 2 GB stay free."""
    ledger = Ledger(tmp_path)
    ticket = ledger.take_ticket(ME, Need(), 0, hold_mutex(ledger.folder, DEADLINE_S))
    device = Device(id="G0", vendor=Vendor.NVIDIA, index=0)
    texts = []
    for available_mb in (1500.0, 9000.0):
        host = Host(memory_total_mb=24 * 1024.0, memory_available_mb=available_mb)
        status = read_ledger_status(ledger, Snapshot(taken_at=0.0, host=host, devices=(device,)))
        texts.append([reason.text for waiting in status.waiting for reason in waiting.reasons])
    ticket.release()
    assert texts == [["1.5 GB of RAM available, and 2 GB stay free"], []]
