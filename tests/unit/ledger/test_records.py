"""Records of other users: any content is a valid lease, a valid ticket, or named as ignored; nothing raises."""

import json
import math
import os
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.ledger.ledger_status import LedgerStatus, WaitingTicket
from gpuyard.ledger.lock_file import HeldFile
from gpuyard.ledger.measured_usage import measure
from gpuyard.ledger.records import (
    MAX_TICKETS_PER_USER,
    BadRecord,
    encode_lease,
    encode_ticket,
    oldest_per_user,
    read_record,
    replace_shares,
)
from gpuyard.model.lease import Claim, Holder, HostShare, Lease, Need, Share, Ticket
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from gpuyard.model.submit_options import MAX_PRIORITY
from gpuyard.policy.machine import Machine
from gpuyard.policy.placement import choose, in_queue_order
from gpuyard.system.processes import is_stopped, user_name
from gpuyard.ui.views import Frame
from gpuyard.ui.views.machine_tables import ignored_texts, lease_lines

OWNER = 61002
MACHINE_MB = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
HOLDER = Holder(uid=0, user="root", pid=17, label="train")
LEASE = {"holder": {"uid": 0, "user": "root", "pid": 17}, "shares": [{"device_id": "G0", "memory_mb": 1024.0}]}
TICKET = {"holder": {"uid": 0, "user": "root", "pid": 17}, "need": {"devices": 1}, "priority": 3}


def found(content: bytes, name: str = "17-ab.lease") -> HeldFile:
    return HeldFile(name=name, uid=OWNER, made_at=time.time(), content=content)


def read(shape: object, suffix: str = ".lease", name: str = "17-ab") -> Lease | Ticket | BadRecord | None:
    return read_record(found(json.dumps(shape).encode(), name + suffix))


def changed(shape: Any, path: Iterable[str | int], value: object) -> Any:
    copied = json.loads(json.dumps(shape))
    *parents, last = path
    inner = copied
    for part in parents:
        inner = inner[part]
    inner[last] = value
    return copied


def test_what_is_written_is_read_with_the_owner_of_the_file_as_holder() -> None:
    shares = (Share(device_id="G0", memory_mb=512.0, is_exclusive=False),)
    lease = read_record(found(encode_lease(HOLDER, Claim(shares=shares))))
    assert isinstance(lease, Lease)
    assert (lease.id, lease.shares, lease.holder.pid, lease.holder.label) == ("17-ab", shares, 17, "train")
    ticket = read_record(found(encode_ticket(HOLDER, Need(devices=2), 5), "1-c.ticket"))
    assert isinstance(ticket, Ticket)
    assert (ticket.need, ticket.priority) == (Need(devices=2), 5)
    lease = read(LEASE)
    assert isinstance(lease, Lease)
    assert (lease.holder.uid, lease.holder.user) == (OWNER, user_name(OWNER))
    assert read(changed(LEASE, ["shares"], [])) is None
    host = HostShare(ram_mb=8192.0, cpus=4.0, used_mb=100.0)
    lease = read_record(found(encode_lease(HOLDER, Claim(shares=(), host=host))))
    assert isinstance(lease, Lease)
    assert (lease.shares, lease.host) == ((), host)
    lease = read(LEASE)
    assert isinstance(lease, Lease)
    assert lease.host is None


def test_new_shares_leave_the_share_of_the_host_as_it_is_unless_there_is_a_new_one() -> None:
    host = HostShare(ram_mb=8192.0)
    content = encode_lease(HOLDER, Claim(shares=(Share(device_id="G0"),), host=host))
    suspended = replace_shares(content, Claim(shares=()))
    lease = read_record(found(suspended))
    assert isinstance(lease, Lease)
    assert (lease.shares, lease.host) == ((), host)
    lease = read_record(found(replace_shares(suspended, Claim(shares=(), host=HostShare(ram_mb=1.0)))))
    assert isinstance(lease, Lease)
    assert lease.host == HostShare(ram_mb=1.0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["holder", "pid"], -5), (["holder", "pid"], 0), (["holder", "pid"], 1 << 23),
        (["holder", "pid_started"], -1.0), (["holder", "pid_started"], 1e300), (["holder", "boot_id"], "x" * 5000),
        (["shares", 0, "memory_mb"], -1.0), (["shares", 0, "memory_mb"], 1e10),
        (["shares", 0, "load_percent"], -1.0), (["shares", 0, "load_percent"], 1e13), (["host"], {"ram_mb": -1.0}),
        (["host"], {"ram_mb": 1e300}), (["host"], {"ram_mb": MACHINE_MB + 1}), (["host"], {"cpus": -1}),
        (["host"], {"cpus": 1e7}), (["host"], {"used_mb": -1.0}), (["host"], {"used_cpus": 1e300}),
        (["host"], {"ram_mb": "8G"}), (["shares", 0, "foreign_mb"], -1e300), (["shares", 0, "device_id"], ""),
        (["shares", 0, "device_id"], "\x1b[31mG0"), (["shares", 0, "device_id"], "G" * 300),
        (["shares"], [{"device_id": "G0"}, {"device_id": "G0"}]),
        (["shares"], [{"device_id": f"{number}"} for number in range(5000)]),
    ],
)  # fmt: skip
def test_a_lease_with_a_field_out_of_bounds_is_ignored(path: list[str | int], value: object) -> None:
    bad = read(changed(LEASE, path, value))
    assert isinstance(bad, BadRecord)
    assert (bad.name, bad.uid, bad.user) == ("17-ab.lease", OWNER, user_name(OWNER))
    assert bad.problem


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("devices", -1), ("devices", 10**6), ("memory", {"type": "fixed", "mb": -1.0}),
        ("memory", {"type": "rest", "least_mb": 1e300}), ("memory", {"type": "part", "part": 7.0}),
        ("memory", {"type": "whole", "free_mb": -1.0}), ("memory_on", [["G0", {"type": "fixed", "mb": -1.0}]]),
        ("memory_on", [["G0", {"type": "part", "part": 7.0}]]), ("memory_on", [["\n", {"type": "whole"}]]),
        ("memory_on", [[str(number), {"type": "whole"}] for number in range(5000)]), ("only", ["\n"]),
        ("only", [str(number) for number in range(9000)]), ("banned", ["x" * 1000]), ("model", "\u202e"),
        ("max_utilization_percent", -1.0), ("max_power_w", -1.0), ("max_memory_used_mb", -1.0),
        ("max_cpu_percent", -1.0), ("min_host_memory_mb", 1e300), ("load_percent", -1.0),
        ("host", {"ram_mb": 1e12}), ("host", {"cpus": -0.5}),
    ],
)  # fmt: skip
def test_a_ticket_with_a_need_out_of_bounds_is_ignored(field: str, value: object) -> None:
    assert isinstance(read(changed(TICKET, ["need", field], value), ".ticket"), BadRecord)


def test_a_priority_and_a_label_are_bounded() -> None:
    for priority, counted in ((10**15, MAX_PRIORITY), (-(10**15), -MAX_PRIORITY), (7, 7)):
        ticket = read(changed(TICKET, ["priority"], priority), ".ticket")
        assert isinstance(ticket, Ticket)
        assert ticket.priority == counted
    lease = read(changed(LEASE, ["holder", "label"], "\x1b]0;x\x07" + "y" * 5000))
    assert isinstance(lease, Lease)
    assert lease.holder.label is not None
    assert lease.holder.label.startswith("\\x1b]0;x\\x07yyy")
    assert len(lease.holder.label) == 200


@pytest.mark.parametrize("name", ["", "a b", "\x1b[2J", "é", "x" * 101, "a\n", "..\u202e"])
def test_a_file_name_that_gpuyard_does_not_give_is_ignored_and_shown_escaped(name: str) -> None:
    bad = read(LEASE, name=name)
    assert isinstance(bad, BadRecord)
    assert str(bad).isprintable()
    assert len(bad.name) <= 100


def tickets(uid: int, count: int, since: float) -> list[Ticket]:
    holder = Holder(uid=uid, user=str(uid), pid=1)
    return [Ticket(id=f"{uid}-{number}", holder=holder, need=Need(), since=since + number) for number in range(count)]


def test_only_the_oldest_tickets_of_each_user_count_and_the_rest_makes_a_few_lines() -> None:
    many, few = tickets(7, 5000, since=0.0), tickets(8, 3, since=9000.0)
    counted, bad = oldest_per_user([*few, *reversed(many)])
    assert counted == (*many[:MAX_TICKETS_PER_USER], *few)
    assert len(bad) == 5000 - MAX_TICKETS_PER_USER
    assert {record.uid for record in bad} == {7}
    _, bad = oldest_per_user(tickets(7, 5000, since=0.0))
    lines = ignored_texts(bad)
    assert len(lines) == 12
    assert "and 4862 more" in lines[10]


def snapshot() -> Snapshot:
    device = Device(id="G0", vendor=Vendor.NVIDIA, index=0, memory_total_mb=1e5, memory_used_mb=5.0, memory_free_mb=9e4)
    return Snapshot(taken_at=0.0, host=Host(), devices=(device, msgspec.structs.replace(device, id="G1", processes=())))


def use_everywhere(record: Lease | Ticket | BadRecord | None) -> None:
    """Hand the record to placement and to the tables, and check what they may rely on."""
    here = snapshot()
    leases = (record,) if isinstance(record, Lease) else ()
    waiting = (record,) if isinstance(record, Ticket) else ()
    bad = (record,) if isinstance(record, BadRecord) else ()
    for ticket in waiting:
        is_stopped(ticket.holder)
    ahead = tuple(in_queue_order(waiting))
    view = Machine(now=time.time() + 100.0, snapshot=here, leases=leases, ahead=ahead)
    view = msgspec.structs.replace(view, measured=measure(here, leases))
    for need in (Need(), Need(devices=2), *(ticket.need for ticket in waiting)):
        choice = choose(need, view)
        assert choice.claim is None or {share.device_id for share in choice.claim.shares} <= {"G0", "G1"}
    shown = tuple(WaitingTicket(ticket=each, reasons=choose(each.need, view).reasons) for each in waiting)
    status = LedgerStatus(snapshot=here, leases=leases, measured=view.measured, waiting=shown, foreign_uses=(), bad=bad)
    for width in (40, None):
        for line in lease_lines(status, Frame(width=width), {}, {}):
            assert all(text.isprintable() for text, _ in line)
    msgspec.json.encode([leases, waiting, bad])


@given(st.binary(max_size=300), st.sampled_from([".lease", ".ticket"]))
def test_no_bytes_raise(content: bytes, suffix: str) -> None:
    record = read_record(found(content, f"17-ab{suffix}"))
    assert isinstance(record, BadRecord)
    use_everywhere(record)


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.text(st.characters(categories=["Cc", "Cf"]))
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.sampled_from([0, -1, 1, 1e9, 2**22, 4096, math.pi])
)
LEASE_FIELDS = [
    ["holder"], ["shares"], ["holder", "pid"], ["holder", "pid_started"], ["holder", "boot_id"], ["holder", "label"],
    ["holder", "user"], ["shares", 0], ["shares", 0, "device_id"], ["shares", 0, "memory_mb"],
    ["shares", 0, "load_percent"], ["shares", 0, "is_exclusive"], ["shares", 0, "foreign_mb"],
]  # fmt: skip
TICKET_FIELDS = [
    ["holder"], ["holder", "pid"], ["need"], ["priority"],
    *(["need", field] for field in Need.__struct_fields__),
]  # fmt: skip


@given(st.sampled_from(LEASE_FIELDS), VALUES | NUMBERS)
def test_no_lease_with_a_changed_field_raises(path: list[str | int], value: object) -> None:
    record = read(changed(LEASE, path, value))
    use_everywhere(record)
    if isinstance(record, Lease):
        assert record.holder.pid > 0
        assert all((share.memory_mb or 0.0) >= 0.0 for share in record.shares)


@given(st.sampled_from(TICKET_FIELDS), VALUES | NUMBERS)
def test_no_ticket_with_a_changed_field_raises(path: list[str | int], value: object) -> None:
    use_everywhere(read(changed(TICKET, path, value), ".ticket"))


MEMORIES = st.one_of(
    st.fixed_dictionaries({"type": st.just("fixed"), "mb": NUMBERS}),
    st.fixed_dictionaries({"type": st.just("rest"), "least_mb": NUMBERS}),
    st.fixed_dictionaries({"type": st.just("part"), "part": NUMBERS}),
    st.fixed_dictionaries({"type": st.just("whole"), "free_mb": st.none() | NUMBERS}),
    st.just({"type": "unknown"}),
)


@given(MEMORIES, st.integers(0, 5), NUMBERS, NUMBERS)
def test_placement_accepts_any_read_need(memory: dict[str, object], devices: int, limit: float, load: float) -> None:
    need = {"memory": memory, "devices": devices, "max_power_w": limit, "load_percent": load}
    use_everywhere(read(changed(TICKET, ["need"], need), ".ticket"))


@given(st.text(st.characters()).map(lambda name: name.replace("/", "_").replace("\x00", "_")))
def test_no_file_name_raises(name: str) -> None:
    use_everywhere(read(LEASE, name=name))
