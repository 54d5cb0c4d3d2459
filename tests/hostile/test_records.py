"""Attacks with lease and ticket files whose content or name is forged."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpuyard.errors import UserError
from gpuyard.ledger import lock_file
from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.records import MAX_TICKETS_PER_USER
from gpuyard.ledger.wait_for_devices import Acquisition
from gpuyard.model.lease import Need
from tests.hostile.catalogue import attack
from tests.hostile.ledger_attacks import (
    anne_gets,
    ben_holds,
    gpuyard,
    hold_files,
    ignored,
    lease_gpus,
    record,
    ticket_order,
    two_gpus,
)
from tests.hostile.users import ANNE, BEN, act_as, stay_as
from tests.unit.ledger import child

ONE_GPU = {"devices": 1}
A_SHARE = {"device_id": "G0", "memory_mb": 1024.0, "is_exclusive": False}


@attack("hold a ticket with the pid -5", now="ignored")
def test_ticket_with_a_negative_pid(ledger: Path) -> None:
    with ben_holds(ledger, ("1-0.ticket", record(need=ONE_GPU, pid=-5))):
        assert anne_gets(ledger) == ["G0", "G1"]
        assert gpuyard("run", "--gpus", "2", "true").returncode == 0
        (found,) = ignored()
        assert (found["name"], found["uid"]) == ("1-0.ticket", BEN)
        assert found["problem"] == "pid is -5, not 1 to 4194304"
        assert b"1-0.ticket of" in gpuyard("doctor").stdout


@attack("hold a ticket with a pid that no C type can hold", now="ignored")
def test_ticket_with_a_huge_pid(ledger: Path) -> None:
    with ben_holds(ledger, ("1-0.ticket", record(need=ONE_GPU, pid=10**18)), ("1-1.lease", record(pid=2**63))):
        assert anne_gets(ledger) == ["G0", "G1"]


@attack("hold a lease with the pid -5", now="ignored")
def test_lease_with_a_negative_pid(ledger: Path) -> None:
    with ben_holds(ledger, ("1-0.lease", record([{"device_id": "G0"}], pid=-5))):
        assert anne_gets(ledger) == ["G0", "G1"]
        assert gpuyard("leases").returncode == 0


@attack(
    "wait with the priority 10^15",
    now="bounded: it counts as 1,000,000, which the command line allows everybody",
)
def test_ticket_with_a_huge_priority(ledger: Path) -> None:
    with child(stay_as, ANNE, hold_files, str(ledger), [("1-0.ticket", record(need=ONE_GPU, priority=10**6))]) as anne:
        anne.receive()
        with ben_holds(ledger, ("2-0.ticket", record(need=ONE_GPU, priority=10**15))):
            assert ticket_order(ledger) == [ANNE, BEN]


@attack(
    "hold 300 tickets",
    now=f"bounded: {MAX_TICKETS_PER_USER} tickets of a user count",
)
def test_many_tickets(ledger: Path) -> None:
    files = [(f"1-{number}.ticket", record(need={"devices": 3})) for number in range(300)]
    with ben_holds(ledger, *files):
        assert ticket_order(ledger) == [BEN] * MAX_TICKETS_PER_USER
        assert anne_gets(ledger) == ["G0", "G1"]
        named = gpuyard("leases").stdout
        assert named.count(b"only the oldest") == 10
        assert b"and 162 more files are ignored" in named


@attack("wait for more GPUs than the machine has", now="harmless: nothing is kept free for it")
def test_ticket_that_can_never_be_met(ledger: Path) -> None:
    with ben_holds(ledger, ("1-0.ticket", record(need={"devices": 3})), ("1-1.ticket", record(need={"devices": 9999}))):
        assert anne_gets(ledger) == ["G0", "G1"]


@attack("wait for a GPU of a model that does not exist", now="harmless: nothing is kept free for it")
def test_ticket_for_a_model_that_does_not_exist(ledger: Path) -> None:
    with ben_holds(ledger, ("1-0.ticket", record(need={"model": "(a+)+$", "only": ["G7"]}))):
        assert anne_gets(ledger) == ["G0", "G1"]


@attack("wait for minus two GPUs", now="ignored")
def test_ticket_for_a_negative_number_of_gpus(ledger: Path) -> None:
    with ben_holds(ledger, ("1-0.ticket", record(need={"devices": -1}))):
        assert anne_gets(ledger) == ["G0", "G1"]


@attack("wait with a memory of -10^300 MB", now="ignored")
def test_ticket_with_negative_memory(ledger: Path) -> None:
    need = {"devices": 2, "memory": {"type": "fixed", "mb": -1e300}}
    with ben_holds(ledger, ("1-0.ticket", record(need=need))):
        assert anne_gets(ledger) == ["G0", "G1"]


@attack(
    "hold a lease of -100 GB of a GPU",
    now="ignored",
)
def test_lease_with_negative_memory(ledger: Path) -> None:
    share = {**A_SHARE, "memory_mb": -102400.0}
    with ben_holds(ledger, ("1-0.lease", record([share])), ("1-1.lease", record([{**share, "device_id": "G1"}]))):
        assert anne_gets(ledger, 1, vram_mb=48000.0) is None
        assert anne_gets(ledger, 1, vram_mb=24000.0) is not None


@attack("hold a lease of 10^300 MB of a GPU", now="ignored")
def test_lease_with_huge_memory(ledger: Path) -> None:
    with ben_holds(ledger, ("1-0.lease", record([{**A_SHARE, "memory_mb": 1e300}]))):
        assert anne_gets(ledger) == ["G0", "G1"]


@attack("hold a lease that lists one GPU 1,000 times", now="ignored")
def test_lease_that_repeats_a_device(ledger: Path) -> None:
    with ben_holds(ledger, ("1-0.lease", record([A_SHARE] * 600))):
        assert anne_gets(ledger) == ["G0", "G1"]


@attack("claim a load of 10^300 percent", now="ignored")
def test_lease_with_a_huge_load(ledger: Path) -> None:
    with ben_holds(ledger, ("1-0.lease", record([{**A_SHARE, "load_percent": 1e300}]))):
        assert Ledger(ledger).leases() == ()


@attack("hold leases of devices that do not exist", now="harmless")
def test_leases_of_devices_that_do_not_exist(ledger: Path) -> None:
    shares = [{"device_id": f"GHOST-{number}"} for number in range(500)]
    with ben_holds(ledger, ("1-0.lease", record(shares))):
        assert anne_gets(ledger) == ["G0", "G1"]


@attack(
    "write another user's name and uid into a lease",
    now="harmless: the holder is the owner of the file",
)
def test_lease_in_anothers_name(ledger: Path) -> None:
    with ben_holds(ledger, ("1-0.lease", record([{"device_id": "G0"}], uid=ANNE, user="anne"))):
        (lease,) = Ledger(ledger).leases()
        assert (lease.holder.uid, lease.holder.user) == (BEN, str(BEN))


@attack(
    "name another user's process in a lease, to have its memory charged to the lease",
    now="harmless: process and lease must belong to one user",
)
def test_lease_that_names_anothers_process(ledger: Path) -> None:
    from gpuyard.ledger.measured_usage import LeaseFinder

    with ben_holds(ledger, ("1-0.lease", record([{"device_id": "G0"}], pid=os.getpid()))):
        assert LeaseFinder(Ledger(ledger).leases()).find(os.getpid()) == []


@attack("name a file so that it looks like a lease of its own, with 240 letters", now="ignored")
def test_lease_with_a_long_name(ledger: Path) -> None:
    with ben_holds(ledger, (f"{'x' * 240}.lease", record([{"device_id": "G0"}]))):
        assert anne_gets(ledger) == ["G0", "G1"]
        assert len(ignored()[0]["name"]) == 100


@attack("leave pipes, links, sockets and folders that are named like leases", now="harmless")
def test_files_that_are_not_files(ledger: Path) -> None:
    act_as(BEN, make_odd_files, str(ledger))
    assert anne_gets(ledger) == ["G0", "G1"]


def make_odd_files(folder: str) -> None:
    os.mkfifo(f"{folder}/1-0.lease")
    os.mkfifo(f"{folder}/1-0.ticket")
    os.symlink("/dev/zero", f"{folder}/1-1.lease")
    os.symlink("1-1.lease", f"{folder}/1-1.ticket")
    os.mkdir(f"{folder}/1-2.lease")


@attack("nest a record 60,000 levels deep", now="ignored")
def test_deeply_nested_record(ledger: Path) -> None:
    with ben_holds(ledger, ("1-0.lease", b'{"x":' + b"[" * 60_000), ("1-0.ticket", b'{"need":' * 6000)):
        assert anne_gets(ledger) == ["G0", "G1"]
        assert [found["uid"] for found in ignored()] == [BEN, BEN]


@attack("append to one's own lease until it is 1 GB", now="ignored")
def test_huge_record(ledger: Path) -> None:
    with child(stay_as, BEN, hold_a_huge_file, str(ledger)) as ben:
        ben.receive()
        assert anne_gets(ledger) == ["G0", "G1"]
        assert len(ignored()) == 1


def hold_a_huge_file(folder: str) -> None:
    hold_files(folder, [("1-0.lease", record([{"device_id": "G0"}]) + b" ")])
    os.truncate(f"{folder}/1-0.lease", 1 << 30)  # a hole: it takes no space


@attack("end another user's lease with `gpuyard leases release`", now="refused")
def test_release_anothers_lease(ledger: Path) -> None:
    lease = Acquisition(Ledger(ledger), two_gpus, Need()).attempt()
    assert lease is not None
    with pytest.raises(UserError, match="belongs to"):
        act_as(BEN, end_lease, str(ledger), lease.lease.id)
    lease.release()


def end_lease(folder: str, lease_id: str) -> None:
    Ledger(Path(folder)).end(lease_id)


MUTATED = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers(), max_size=3), st.just({})
)
NAMES = st.text(max_size=20).map(lambda text: text.replace("/", "_").replace("\x00", "_"))


def rewrite_own(folder: str, content: bytes) -> None:
    for name in ("1-0.lease", "1-0.ticket"):
        with open(f"{folder}/{name}", "wb") as file:
            file.write(content)


@attack("hold leases and tickets of random bytes", now="ignored")
def test_random_bytes(ledger: Path) -> None:
    with ben_holds(ledger, ("1-0.lease", b" "), ("1-0.ticket", b" ")):

        @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.binary(max_size=200))
        def check(content: bytes) -> None:
            rewrite_own(str(ledger), content)
            assert lease_gpus(str(ledger), 2) == ["G0", "G1"]

        check()


@attack("hold tickets with a field of any value", now="ignored")
def test_mutated_tickets(ledger: Path) -> None:
    fields = ("devices", "memory", "only", "banned", "vendor", "model", "max_power_w", "load_percent")
    holders = ("pid", "pid_started", "boot_id", "label")
    with ben_holds(ledger, ("1-0.lease", b" "), ("1-0.ticket", b" ")):

        @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.sampled_from(fields + holders), MUTATED)
        @example(field="pid", value=-1)
        @example(field="pid", value=2**62)
        @example(field="devices", value=-1)
        def check(field: str, value: object) -> None:
            need = {"devices": 3} | ({field: value} if field in fields else {})
            holder = {} if field in fields else {field: value}
            rewrite_own(str(ledger), record(need=need, **holder))
            assert lease_gpus(str(ledger), 1) is not None or field == "devices"

        check()


@attack("give lease files any names", now="ignored")
def test_any_file_name(ledger: Path) -> None:
    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(NAMES)
    def check(name: str) -> None:
        path = f"{ledger}/x{name}.lease".encode(errors="surrogatepass")
        from gpuyard.ledger.lock_file import LockFile

        file = LockFile(os.fsdecode(path), record([{"device_id": "G0"}]))
        os.chown(path, BEN, BEN)
        contents = Ledger(ledger).contents()
        file.release()
        for lease in contents.leases:
            assert lease.id.isascii()
            assert lease.id.isprintable()
        for bad in contents.bad:
            assert bad.name.isprintable()
        assert len(contents.leases) + len(contents.bad) == 1

    check()


@attack(
    "lease more RAM than the machine has",
    now="ignored",
)
def test_lease_of_more_ram_than_the_machine_has(ledger: Path) -> None:
    content = json.dumps({**json.loads(record()), "host": {"ram_mb": 1e9}}).encode()
    with ben_holds(ledger, ("1-0.lease", content)):
        assert gpuyard("run", "--gpus", "0", "--ram", "100M", "true").returncode == 0
        (found,) = ignored()
        assert found["uid"] == BEN
        assert found["problem"].startswith("ram_mb is 1e+09, not 0 to ")


def count_bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the records that are parsed from now on to see whose machine they are of."""
    read: list[int] = []

    def note(content: bytes) -> bool:
        read.append(len(content))
        return False

    monkeypatch.setattr(lock_file, "is_elsewhere", note)
    return read


def link_often(folder: str, content: bytes, count: int) -> None:
    hold_files(folder, [("1-0.lease", content)])
    for number in range(1, count):
        os.link(f"{folder}/1-0.lease", f"{folder}/1-{number}.lease")


@attack(
    "hold a lease of 64 KB under 2,000 names",
    now="harmless: the file is read once",
)
def test_lease_with_many_names(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_bytes_read(monkeypatch)
    shares = [{"device_id": f"G{number}", "memory_mb": 1024.0, "is_exclusive": False} for number in range(900)]
    with child(stay_as, BEN, link_often, str(ledger), record(shares), 2000) as ben:
        ben.receive()
        assert len(os.listdir(ledger)) >= 2000
        (found,) = Ledger(ledger).leases()
        assert (found.holder.uid, len(found.shares)) == (BEN, 900)
        assert sum(read) == len(record(shares))
        assert anne_gets(ledger, 1, vram_mb=20000.0) is not None


@attack(
    "hold leases of 64 KB, 16 MB in all",
    now="bounded: 8 MB of a user are read, and the user is named",
)
def test_large_leases(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_bytes_read(monkeypatch)
    content = record([{"device_id": "G0", "memory_mb": 1.0, "is_exclusive": False}]).ljust(65000)
    with ben_holds(ledger, *((f"1-{number}.lease", content) for number in range(256))):
        live = Ledger(ledger).contents()
        assert len(live.leases) == (8 << 20) // 65000
        (named,) = live.bad
        assert (named.uid, named.name) == (BEN, f"a group of {256 - len(live.leases)} files")
        assert sum(read) <= (8 << 20) + 65000


@contextlib.contextmanager
def broken_mount(folder: Path) -> Iterator[None]:
    """Mount a FUSE file system whose server has died."""
    folder.mkdir()
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
    try:
        subprocess.run(["mount", "-i", "-t", "fuse", "-o", options, "none", folder], pass_fds=[server], check=True)
    finally:
        os.close(server)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@attack(
    "leave 5,000 files and a mount that does not answer",
    now="ignored: what cannot be read is named and passed over",
)
def test_file_on_a_broken_mount(ledger: Path) -> None:
    for number in range(5000):
        (ledger / f"1-{number}.lease").touch()
        os.chown(ledger / f"1-{number}.lease", BEN, BEN)
    with broken_mount(ledger / "broken.lease"):
        live = Ledger(ledger).contents()
        assert "broken.lease of an unknown user is ignored: it cannot be read: " in " ".join(map(str, live.bad))
        assert anne_gets(ledger) == ["G0", "G1"]
