"""The age of leases and tickets when the wall clock is set, and when a record lies about it."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.ledger_mutex import hold_mutex
from gpuyard.ledger.lock_file import HeldFile
from gpuyard.ledger.records import TicketRecord, read_record
from gpuyard.model.lease import Need, Ticket
from gpuyard.policy.placement import in_queue_order
from gpuyard.system.clock import since_boot
from gpuyard.system.processes import this_process
from tests.unit.ledger import DEADLINE_S, take

DAY_S = 86_400.0
StepClock = Callable[[float], None]


def ticket(name: str, made_at: float, made: float | None) -> Ticket:
    """Return the ticket of a file that the kernel says was made at `made_at`, as its record says at `made`."""
    content = TicketRecord(holder=this_process(), need=Need(), priority=0, made=made)
    found = HeldFile(name=f"{name}.ticket", uid=0, made_at=made_at, content=msgspec.json.encode(content))
    read = read_record(found)
    assert isinstance(read, Ticket)
    return read


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
def test_ages_are_right_after_the_clock_was_set(tmp_path: Path, step_clock: StepClock, step_s: float) -> None:
    ledger = Ledger(tmp_path)
    waiting = ledger.take_ticket(this_process(), Need(), 0, hold_mutex(ledger.folder, DEADLINE_S))
    held = ledger.claim(this_process(), take("G0"), DEADLINE_S)
    assert held is not None
    step_clock(step_s)
    (lease,), (found,) = ledger.leases(), ledger.contents().tickets
    assert 0 <= time.time() - lease.since <= DEADLINE_S
    assert 0 <= time.time() - found.since <= DEADLINE_S
    waiting.release()
    held.release()


def test_a_ticket_from_before_a_step_back_stays_ahead_of_later_ones(step_clock: StepClock) -> None:
    now, boot = time.time(), since_boot()
    before = ticket("1-0", now - 100.0, boot - 100.0)
    step_clock(-DAY_S)
    before = ticket("1-0", now - 100.0, boot - 100.0)
    after = ticket("2-0", now - DAY_S - 1.0, boot - 1.0)
    assert in_queue_order([after, before]) == [before, after]
    assert time.time() - before.since == pytest.approx(100.0, abs=DEADLINE_S)


def test_a_record_cannot_claim_to_wait_longer_than_its_file_nor_to_be_of_the_future() -> None:
    now, boot = time.time(), since_boot()
    assert ticket("1-0", now - 5.0, max(0.0, boot - DAY_S)).since == now - 5.0
    assert ticket("1-0", now - 5.0, 0.0).since == now - 5.0
    assert ticket("1-0", now - 5.0, None).since == now - 5.0
    assert now <= ticket("1-0", now - 5.0, boot + DAY_S).since <= time.time()
