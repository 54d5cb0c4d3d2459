"""Two users share a directory: they wait for each other, and neither gets at what is the other's."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.ledger_mutex import make_shared_directory, prepare_directory
from gpuyard.ledger.measured_usage import HostMeter
from gpuyard.ledger.wait_for_devices import Acquisition
from gpuyard.model.lease import HostShare, Lease, Need
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from gpuyard.system.processes import this_process, user_name
from tests.unit.ledger import DEADLINE_S, as_root, child, wait_for_message

pytestmark = as_root

ANNE, BEN = 61001, 61002
GROUP = 61000


@pytest.fixture
def folder() -> Iterator[Path]:
    """Outside pytest's own folder, which other users cannot enter."""
    home = Path(tempfile.mkdtemp(prefix="gpuyard-users-"))
    home.chmod(0o755)
    yield make_shared_directory(home / "ledger")
    shutil.rmtree(home)


def become(uid: int) -> None:
    """After a rehearsal: what Python loads late may lie where the new user may not look. The home of the test does."""
    os.environ["GPUYARD_HOME"] = f"/tmp/gpuyard-no-home-{uid}"
    with tempfile.TemporaryDirectory() as scratch:
        Acquisition(Ledger(Path(scratch)), one_device, Need()).wait(DEADLINE_S, 1.0).release()
    os.setgroups([GROUP])
    os.setgid(uid)
    os.setuid(uid)


def one_device() -> Snapshot:
    return Snapshot(taken_at=time.time(), host=Host(), devices=(Device(id="G0", vendor=Vendor.NVIDIA, index=0),))


def hold_as(connection: Connection, folder: Path, uid: int) -> None:
    """Lease the device, report it, and release it at the next message."""
    become(uid)
    with_label = Acquisition(Ledger(prepare_directory(folder)), one_device, Need(), label=f"of {uid}")
    lease = with_label.wait(DEADLINE_S, 1.0, lambda reasons: connection.send(reasons[0].text))
    connection.send(str(lease.path))
    wait_for_message(connection)
    lease.release()
    connection.send("released")


def receive_path(connection: Callable[[], str]) -> str:
    """Wait until the child has its lease. Return the path of the lease."""
    while not (message := connection()).startswith("/"):
        pass
    return message


def test_two_users_wait_for_each_other_and_the_reason_names_the_holder(folder: Path) -> None:
    with child(hold_as, folder, ANNE) as anne:
        receive_path(anne.receive)
        with child(hold_as, folder, BEN) as ben:
            assert ben.receive() == f"held by {user_name(ANNE)}, pid {anne.pid} (of {ANNE})"
            anne.send("release")
            receive_path(ben.receive)
            (lease,) = Ledger(folder).leases()
            assert (lease.holder.uid, lease.holder.pid) == (BEN, ben.pid)


def host_of_23_gb() -> Snapshot:
    host = Host(memory_total_mb=23 * 1024.0, memory_available_mb=23 * 1024.0)
    return Snapshot(taken_at=time.time(), host=host)


def hold_ram_as(connection: Connection, folder: Path, uid: int) -> None:
    """Reserve 8 GB of RAM, report it, take 200 MB of it at the next message, and release it at the one after."""
    become(uid)
    need = Need(devices=0, host=HostShare(ram_mb=8 * 1024.0))
    acquisition = Acquisition(Ledger(prepare_directory(folder)), host_of_23_gb, need, label=f"of {uid}")
    lease = acquisition.wait(DEADLINE_S, 1.0, lambda reasons: connection.send(reasons[0].text))
    connection.send(str(lease.path))
    wait_for_message(connection)
    taken = bytearray(200 << 20)
    connection.send(str(len(taken)))
    wait_for_message(connection)
    lease.release()
    connection.send("released")


def test_the_ram_of_all_users_is_reserved_and_measured(folder: Path) -> None:
    """Two leases of 8 GB fit into 21 GB. What another user's process has taken is not charged twice."""
    with child(hold_ram_as, folder, ANNE) as anne, child(hold_ram_as, folder, BEN) as ben:
        receive_path(anne.receive)
        receive_path(ben.receive)
        with child(hold_ram_as, folder, ANNE) as third:
            assert third.receive().startswith("5 GB of 23 GB RAM free, 8 GB needed")
            anne.send("take")
            assert anne.receive() == str(200 << 20)
            leases = Ledger(folder).leases()
            (of_anne,) = [lease for lease in leases if lease.holder.pid == anne.pid]
            used = HostMeter().use_of(leases)[of_anne.id].ram_mb
            assert used is not None
            assert 200 < used < 500
            anne.send("release")
            receive_path(third.receive)


def live(folder: Path) -> tuple[Lease, ...]:
    seen: list[tuple[Lease, ...]] = []
    Ledger(folder).claim(this_process(), lambda leases, _: seen.append(leases), DEADLINE_S)
    return seen[0]


def live_as(connection: Connection, folder: Path, uid: int) -> None:
    become(uid)
    connection.send([(lease.holder.uid, lease.id) for lease in live(folder)])


def test_another_user_s_dead_lease_is_free_and_removed_by_a_user_who_may(folder: Path) -> None:
    with child(hold_as, folder, ANNE) as anne:
        path = Path(receive_path(anne.receive))
        anne.kill()
    with child(hold_as, folder, BEN) as ben:
        receive_path(ben.receive)
        assert path.exists(), "it is not Ben's to remove"
        with child(live_as, folder, ANNE) as again:
            assert [uid for uid, _ in again.receive()] == [BEN]
        assert not path.exists()


def try_as(connection: Connection, folder: Path, uid: int) -> None:
    become(uid)
    try:
        Acquisition(Ledger(prepare_directory(folder)), one_device, Need()).wait(0.0, 1.0)
    except EnvironmentFault as error:
        connection.send(str(error))
    else:
        connection.send("had")


def test_a_group_directory_is_open_to_its_members_only(folder: Path) -> None:
    group_folder = make_shared_directory(folder.parent / "group", GROUP)
    for uid in (ANNE, BEN):
        with child(try_as, group_folder, uid) as member:
            assert member.receive() == "had"
    os.chown(group_folder, 0, 0)
    group_folder.chmod(0o3770)
    with child(try_as, group_folder, BEN) as outsider:
        assert outsider.receive() == f"you cannot write to the lease directory {group_folder}"
