"""The contract of the ledger (`ports.LeaseLedger`), over the real ledger in a folder and the simulated one."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from gpuyard.ledger.ledger import Ledger, QueueLedger
from gpuyard.ledger.ledger_mutex import prepare_directory
from gpuyard.model.lease import Claim, Holder, Lease, Need, Share, Ticket
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from gpuyard.ports import HeldClaim, LeaseLedger, WantedClaim
from gpuyard.system.processes import start_time
from tests.in_time import wait_until_gone
from tests.simulation.behaviors import Behavior
from tests.simulation.ledger import SimulatedLedger
from tests.simulation.world import World

DEADLINE_S = 90.0
DEVICES = ("SIM-0", "SIM-1")
# A daemon that holds a lease, has handed another to a child, waits with a ticket, and is killed.
_DAEMON = """
import os, signal, subprocess, sys
from pathlib import Path
from gpuyard.model.lease import Claim, Holder, Need, Share
from gpuyard.ledger.ledger import QueueLedger
from gpuyard.ledger.ledger import Ledger
from gpuyard.ports import WantedClaim
book = QueueLedger(Ledger(Path(sys.argv[1])), Holder(uid=os.getuid(), user="me", pid=os.getpid()))
wanted = [WantedClaim(claim=Claim(shares=(Share(device_id=device),)), label=device) for device in ("SIM-0", "SIM-1")]
kept, left = book.grant(lambda leases, tickets: wanted)
book.take_ticket(Need(devices=2), 3, "job 9")
os.set_inheritable(left.descriptor, True)
child = subprocess.Popen(["sleep", "3600"], pass_fds=[left.descriptor], stdout=subprocess.DEVNULL)
left.leave()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


class FolderPlace:
    def __init__(self, folder: Path) -> None:
        self._folder = prepare_directory(folder / "leases")
        self._children: list[subprocess.Popen[bytes]] = []
        self._others: list[int] = []

    def ledger(self) -> QueueLedger:
        me = Holder(uid=os.getuid(), user="me", pid=os.getpid(), pid_started=start_time(os.getpid()))
        return QueueLedger(Ledger(self._folder), me)

    def inherit(self, held: HeldClaim) -> int:
        child = subprocess.Popen(["sleep", "3600"], pass_fds=[held.descriptor])
        self._children.append(child)
        return child.pid

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        for child in self._children:
            if child.pid == pid:
                child.wait(DEADLINE_S)
        if pid in self._others:
            self._others.remove(pid)
            wait_until_gone(pid)  # its locks go with it

    def die(self) -> int:
        call = [sys.executable, "-c", _DAEMON, str(self._folder)]
        ran = subprocess.run(call, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=False)
        assert ran.returncode == -signal.SIGKILL
        self._others.append(int(ran.stdout))
        return self._others[-1]

    def snapshot(self) -> Snapshot:
        devices = tuple(
            Device(id=device, vendor=Vendor.SIMULATED, memory_used_mb=0.0, memory_free_mb=1000.0, processes=())
            for device in DEVICES
        )
        return Snapshot(taken_at=0.0, host=Host(), devices=devices)

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait(DEADLINE_S)
        for pid in self._others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class SimulatedPlace:
    def __init__(self) -> None:
        self._world = World(1, lambda *_: Behavior(runs_s=1e9), devices=len(DEVICES))
        self._lives = 0

    def ledger(self) -> SimulatedLedger:
        self._lives += 1
        me = Holder(uid=1, user="me", pid=self._lives)
        return SimulatedLedger(self._world, me, f"life {self._lives}")

    def inherit(self, held: HeldClaim) -> int:
        program = self._world.spawn(1, 1, ("program",), held.lease.id)
        self._world.begin(program)
        return program.pid

    def kill(self, pid: int) -> None:
        for program in self._world.programs:
            if program.pid == pid:
                self._world.exit(program, "137")

    def die(self) -> int:
        ledger = self.ledger()
        _, left = ledger.grant(lambda leases, tickets: [wanted("SIM-0"), wanted("SIM-1")])
        ledger.take_ticket(Need(devices=2), 3, "job 9")
        pid = self.inherit(left)
        left.leave()
        ledger.die()
        return pid

    def snapshot(self) -> Snapshot:
        return self._world.snapshot()


Place = FolderPlace | SimulatedPlace


@pytest.fixture(params=["folder", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "simulated":
        yield SimulatedPlace()
        return
    folder = FolderPlace(tmp_path)
    yield folder
    folder.close()


def wanted(*device_ids: str, label: str = "job 1") -> WantedClaim:
    return WantedClaim(claim=Claim(shares=tuple(Share(device_id=device_id) for device_id in device_ids)), label=label)


def live_records(ledger: LeaseLedger) -> tuple[tuple[Lease, ...], tuple[Ticket, ...]]:
    """Return the live leases and tickets, as a decision sees them."""
    records: list[tuple[tuple[Lease, ...], tuple[Ticket, ...]]] = []

    def read(leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> Sequence[WantedClaim]:
        records.append((leases, tickets))
        return []

    assert not ledger.grant(read)
    return records[0]


def leased(ledger: LeaseLedger) -> list[str]:
    return sorted(share.device_id for lease in live_records(ledger)[0] for share in lease.shares)


def test_claims_are_granted_and_visible_to_every_daemon(place: Place) -> None:
    mine, other = place.ledger(), place.ledger()
    first, second = mine.grant(lambda leases, tickets: [wanted("SIM-0"), wanted("SIM-1", label="job 2")])
    assert [share.device_id for share in first.lease.shares] == ["SIM-0"]
    assert second.lease.holder.label == "job 2"
    assert {lease.id for lease in live_records(other)[0]} == {first.lease.id, second.lease.id}
    assert leased(other) == ["SIM-0", "SIM-1"]
    for held in (first, second):
        held.release()
    assert leased(other) == [], "all wanted claims are granted and visible to every daemon"
    ledger = place.ledger()
    [held] = ledger.grant(lambda leases, tickets: [wanted("SIM-0", label="job 7")])
    [seen] = live_records(ledger)[0]
    assert seen.holder.label == held.lease.holder.label == "job 7"
    assert msgspec.structs.asdict(seen)["shares"] == held.lease.shares, "leases are listed with their holders"
    held.release()
    ledger = place.ledger()
    [held] = ledger.grant(lambda leases, tickets: [wanted("SIM-0", "SIM-1")])
    measured = ledger.measure(place.snapshot(), live_records(ledger)[0])
    assert measured == {(held.lease.id, device): 0.0 for device in DEVICES}
    held.release()
    assert ledger.measure(place.snapshot(), ()) == {}, "a lease that uses no memory yet is measured as zero"


def test_a_decision_sees_earlier_leases_and_grants_nothing_if_it_fails(place: Place) -> None:
    ledger = place.ledger()
    [held] = ledger.grant(lambda leases, tickets: [wanted("SIM-0")])
    [later] = ledger.grant(
        lambda leases, tickets: [wanted("SIM-1")] if [one.id for one in leases] == [held.lease.id] else []
    )
    assert leased(ledger) == ["SIM-0", "SIM-1"], "a decision sees the leases granted before"
    held.release()
    later.release()

    def fail(leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> Sequence[WantedClaim]:
        raise RuntimeError("no")

    ledger = place.ledger()
    with pytest.raises(RuntimeError):
        ledger.grant(fail)
    assert leased(ledger) == [], "a decision that fails grants nothing"


def test_a_lease_lives_as_long_as_a_process_that_inherited_it(place: Place) -> None:
    ledger = place.ledger()
    [held] = ledger.grant(lambda leases, tickets: [wanted("SIM-0")])
    pid = place.inherit(held)
    held.leave()
    assert leased(ledger) == ["SIM-0"]
    place.kill(pid)
    assert leased(ledger) == [], "a lease that was handed over lives as long as the process that inherited it"
    ledger = place.ledger()
    [held] = ledger.grant(lambda leases, tickets: [wanted("SIM-0")])
    held.leave()
    assert leased(ledger) == [], "a lease that no process inherited ends"
    ledger = place.ledger()
    [held] = ledger.grant(lambda leases, tickets: [wanted("SIM-0")])
    pid = place.inherit(held)
    held.release()
    assert leased(ledger) == [], "releasing a lease ends it for processes that inherited it too"
    place.kill(pid)


def test_a_killed_daemon_holds_only_leases_that_others_inherited(place: Place) -> None:
    pid = place.die()
    ledger = place.ledger()
    assert leased(ledger) == ["SIM-1"]
    assert live_records(ledger)[1] == ()
    place.kill(pid)
    assert leased(ledger) == []


def test_a_ticket_is_visible_to_all_and_kept_while_the_need_is_the_same(place: Place) -> None:
    mine, other = place.ledger(), place.ledger()
    assert mine.my_ticket() is None
    mine.take_ticket(Need(devices=2), 3, "job 9")
    ticket = mine.my_ticket()
    mine.take_ticket(Need(devices=2), 3, "job 10")
    assert mine.my_ticket() == ticket
    [seen] = live_records(other)[1]
    assert (seen.id, seen.need, seen.priority) == (ticket, Need(devices=2), 3)
    assert other.my_ticket() is None
    mine.return_ticket()
    assert mine.my_ticket() is None
    assert live_records(other)[1] == ()
    ledger = place.ledger()
    ledger.take_ticket(Need(devices=1), 0, "job 1")
    before = ledger.my_ticket()
    ledger.take_ticket(Need(devices=2), 0, "job 2")
    [seen] = live_records(ledger)[1]
    assert seen.id == ledger.my_ticket() != before
    assert seen.need.devices == 2, "another need takes another ticket"
    ledger.return_ticket()


def part(device_id: str, memory_mb: float) -> Share:
    return Share(device_id=device_id, memory_mb=memory_mb, is_exclusive=False)


def test_an_amended_lease_has_the_new_shares_while_it_lives(place: Place) -> None:
    mine, other = place.ledger(), place.ledger()
    [held] = mine.grant(lambda leases, tickets: [wanted("SIM-0", label="job 7")])
    shares = (part("SIM-0", 512.0),)
    assert not mine.grant(lambda leases, tickets: [WantedClaim(claim=Claim(shares=shares), amends=held.lease.id)])
    [seen] = live_records(other)[0]
    assert (seen.id, seen.shares, seen.holder.label) == (held.lease.id, shares, "job 7")
    held.release()
    ledger = place.ledger()
    [held] = ledger.grant(lambda leases, tickets: [wanted("SIM-0")])
    amended = WantedClaim(claim=Claim(shares=()), amends=held.lease.id)
    [fresh] = ledger.grant(lambda leases, tickets: [amended, wanted("SIM-0", label="job 2")])
    [seen] = live_records(ledger)[0]
    assert seen.id == fresh.lease.id, "one decision can amend a lease and grant a new one"
    fresh.release()
    held.release()
    ledger = place.ledger()
    [held] = ledger.grant(lambda leases, tickets: [wanted("SIM-0")])
    held.release()
    again = WantedClaim(claim=Claim(shares=(part("SIM-0", 512.0),)), amends=held.lease.id)
    assert not ledger.grant(lambda leases, tickets: [again])
    assert leased(ledger) == [], "amending an ended lease changes nothing"


def test_a_lease_amended_to_nothing_is_hidden_until_it_has_shares_again(place: Place) -> None:
    """Its holder keeps it: it returns under the same id, and ends with its holder."""
    ledger = place.ledger()
    [held] = ledger.grant(lambda leases, tickets: [wanted("SIM-0")])
    pid = place.inherit(held)
    held.leave()
    ledger.grant(lambda leases, tickets: [WantedClaim(claim=Claim(shares=()), amends=held.lease.id)])
    assert live_records(ledger)[0] == ()
    [beside] = ledger.grant(lambda leases, tickets: [wanted("SIM-0", label="job 2")])
    beside.release()
    ledger.grant(
        lambda leases, tickets: [WantedClaim(claim=Claim(shares=(part("SIM-1", 512.0),)), amends=held.lease.id)]
    )
    assert [lease.id for lease in live_records(ledger)[0]] == [held.lease.id]
    assert leased(ledger) == ["SIM-1"]
    place.kill(pid)
    assert leased(ledger) == []
