"""Attacks on the order of requests, and on limits, by way of clocks and the times of files."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.ledger.ledger import Ledger
from tests.hostile.catalogue import attack
from tests.hostile.ledger_attacks import ben_holds, gpuyard, hold_files, record, ticket_order
from tests.hostile.users import ANNE, BEN, act_as, stay_as
from tests.integration.queue_fixture import QueueUnderTest
from tests.unit.ledger import child

ONE_GPU = {"devices": 1}


def made(content: bytes, since_boot: object) -> bytes:
    return json.dumps({**json.loads(content), "made": since_boot}).encode()


@contextlib.contextmanager
def anne_waits(ledger: Path) -> Iterator[None]:
    with child(stay_as, ANNE, hold_files, str(ledger), [("1-0.ticket", record(need=ONE_GPU))]) as anne:
        anne.receive()
        yield


def date_back(path: str) -> None:
    os.utime(path, (0, 0))


def date_forward(path: str) -> None:
    os.utime(path, (4e9, 4e9))


def set_clock() -> None:
    """Set it to what it is: if this were allowed, the machine of the test would not suffer."""
    time.clock_settime(time.CLOCK_REALTIME, time.time())


def link(path: str) -> None:
    os.link(path, f"{path}.copy")


def touch_often(path: str) -> None:
    for number in range(100):
        os.utime(path, (number, number))


@attack("date one's own ticket back, to wait longer than others", now="harmless")
def test_ticket_dated_back(ledger: Path) -> None:
    with anne_waits(ledger), ben_holds(ledger, ("2-0.ticket", record(need=ONE_GPU))):
        act_as(BEN, date_back, str(ledger / "2-0.ticket"))
        assert ticket_order(ledger) == [ANNE, BEN]


@attack("claim in a ticket that one waits since the machine booted", now="harmless")
def test_ticket_that_claims_to_be_old(ledger: Path) -> None:
    with anne_waits(ledger), ben_holds(ledger, ("2-0.ticket", made(record(need=ONE_GPU), 0.0))):
        assert ticket_order(ledger) == [ANNE, BEN]


@attack("claim in a ticket that one waits since before the machine booted", now="ignored")
def test_ticket_that_claims_a_negative_time(ledger: Path) -> None:
    with anne_waits(ledger), ben_holds(ledger, ("2-0.ticket", made(record(need=ONE_GPU), -1e9))):
        assert ticket_order(ledger) == [ANNE]


@attack("claim in a ticket that it is from the future", now="harmless: it only loses its place")
def test_ticket_that_claims_to_be_from_the_future(ledger: Path) -> None:
    with ben_holds(ledger, ("2-0.ticket", made(record(need=ONE_GPU), 1e11))):
        (ticket,) = Ledger(ledger).contents().tickets
        assert os.stat(ledger / "2-0.ticket").st_ctime <= ticket.since <= time.time()


@attack("write a text, a list or a huge number as the time of a ticket", now="ignored")
def test_ticket_with_a_time_that_is_none(ledger: Path) -> None:
    forged = [made(record(need=ONE_GPU), value) for value in ("yesterday", [1], 1e300, {"a": 1})]
    files = [(f"2-{number}.ticket", content) for number, content in enumerate(forged)]
    with ben_holds(ledger, *files):
        assert ticket_order(ledger) == []
        assert gpuyard("leases").returncode == 0


@attack("date another user's ticket forward, so that it loses its place", now="refused")
def test_ticket_of_another_dated_forward(ledger: Path) -> None:
    with anne_waits(ledger), ben_holds(ledger, ("2-0.ticket", record(need=ONE_GPU))):
        with pytest.raises(PermissionError):
            act_as(BEN, date_forward, str(ledger / "1-0.ticket"))
        assert ticket_order(ledger) == [ANNE, BEN]


@attack("link another user's ticket, which changes its time, so that it loses its place", now="refused")
def test_ticket_of_another_linked(ledger: Path) -> None:
    if Path("/proc/sys/fs/protected_hardlinks").read_text().strip() != "1":
        pytest.skip("this machine lets every user link every file")
    with anne_waits(ledger), ben_holds(ledger, ("2-0.ticket", record(need=ONE_GPU))):
        with pytest.raises(PermissionError):
            act_as(BEN, link, str(ledger / "1-0.ticket"))
        assert ticket_order(ledger) == [ANNE, BEN]


@attack("change one's own ticket again and again", now="harmless: it goes behind all others")
def test_ticket_changed_often(ledger: Path) -> None:
    with ben_holds(ledger, ("2-0.ticket", record(need=ONE_GPU))), anne_waits(ledger):
        assert ticket_order(ledger) == [BEN, ANNE]
        act_as(BEN, touch_often, str(ledger / "2-0.ticket"))
        assert ticket_order(ledger) == [ANNE, BEN]


@attack("hold a lease dated 1970 or 2096, to confuse what others are shown", now="harmless")
def test_lease_with_a_strange_date(ledger: Path) -> None:
    with ben_holds(ledger, ("2-0.lease", made(record([{"device_id": "SIM-0"}]), 1e11))):
        for change in (date_back, date_forward):
            act_as(BEN, change, str(ledger / "2-0.lease"))
            shown = gpuyard("leases", "--json")
            (lease,) = json.loads(shown.stdout)["leases"]
            assert lease["since"].startswith(time.strftime("%Y-%m-", time.gmtime()))


@attack("set the machine's clock, to end the jobs of others by their time limits", now="refused")
def test_set_the_clock(queue: QueueUnderTest) -> None:
    job_id, gate = queue.start_gated(time_limit="10m")
    with pytest.raises(PermissionError):
        act_as(BEN, set_clock)
    assert queue.state(job_id) == "running"
    gate.write_text("go\n")
    queue.wait(job_id)
