"""The queue's place in the ledger's line: when it is taken, kept and left."""

from typing import Any, cast

import pytest

from gpuyard.control.ledger_ticket import TICKET_AFTER_S, QueueTicket
from gpuyard.core.lease import Need
from gpuyard.core.scheduling.plan import WaitingJob
from gpuyard.core.scheduling.queue_order import Lane
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.ports import LeaseLedger


class Line:
    """As much of a ledger as has a line."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.ticket: str | None = None

    def take_ticket(self, need: Need, priority: int, label: str) -> None:
        if self.ticket is None:
            self.ticket = label
            self.entered.append(label)

    def return_ticket(self) -> None:
        self.ticket = None

    def my_ticket(self) -> str | None:
        return self.ticket


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def place(line: Line) -> QueueTicket:
    return QueueTicket(cast("LeaseLedger", line))


def head(job_id: int = 1, kind: ReasonKind = ReasonKind.LEASED, **of_lane: Any) -> WaitingJob:
    lane = Lane(id=1, priority=0, user="me", tag="", need=Need(), **of_lane)
    return WaitingJob(job_id=job_id, lane=lane, need=Need(), reasons=(Reason(kind, "why"),))


def test_a_job_that_waits_for_others_enters_the_line_after_a_while(line: Line, place: QueueTicket) -> None:
    place.update(head(), 100.0, has_started=False)
    assert [line.ticket] == [None]
    assert place.wake_at(100.0) == 100.0 + TICKET_AFTER_S
    place.update(head(), 100.0 + TICKET_AFTER_S, has_started=False)
    assert line.ticket == "job 1"
    assert place.wake_at(100.0 + TICKET_AFTER_S) is None


def test_whoever_was_just_served_goes_behind_those_who_wait(line: Line, place: QueueTicket) -> None:
    for now in (100.0, 101.0):
        place.update(head(), now, has_started=False)
    place.update(head(job_id=2), 102.0, has_started=True)
    assert line.ticket is None
    place.update(head(job_id=2), 103.0, has_started=False)
    assert line.entered == ["job 1", "job 2"]


def test_where_nothing_waits_any_more_the_line_is_left(line: Line, place: QueueTicket) -> None:
    for now in (100.0, 101.0):
        place.update(head(), now, has_started=False)
    place.update(None, 102.0, has_started=False)
    assert line.ticket is None
    assert place.wake_at(102.0) is None


@pytest.mark.parametrize("kind", [ReasonKind.PAUSED, ReasonKind.NO_ENGINE])
def test_what_we_hold_back_ourselves_takes_no_place_from_others(
    line: Line, place: QueueTicket, kind: ReasonKind
) -> None:
    for now in (100.0, 101.0):
        place.update(head(kind=kind), now, has_started=False)
    assert line.entered == []
