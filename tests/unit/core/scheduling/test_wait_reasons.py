import pytest

from gpuyard.core.lease import Holder
from gpuyard.core.scheduling import wait_reasons
from gpuyard.core.scheduling.wait_reasons import ReasonKind

ALICE = Holder(uid=1000, user="alice", pid=101, label="train")
BOB = Holder(uid=1001, user="bob", pid=202)


def test_a_holder_is_named_by_user_pid_and_label() -> None:
    assert wait_reasons.describe_holder(ALICE) == "alice, pid 101 (train)"
    assert wait_reasons.describe_holder(BOB) == "bob, pid 202"


def test_several_holders_are_all_named() -> None:
    told = wait_reasons.leased("G0", (ALICE, BOB))
    assert told.text == "held by alice, pid 101 (train); bob, pid 202"
    assert told.holders == (ALICE, BOB)
    assert wait_reasons.awaited("G0", (BOB,)).text == "reserved for bob, pid 202, ahead in the queue"


def test_room_that_is_overdrawn_is_told_as_none() -> None:
    told = wait_reasons.no_room("G0", -500.0, 2048.0, ())
    assert told.text == "0 MB free, 2 GB needed"
    assert (told.had, told.needed) == (-500.0, 2048.0)


def test_what_strangers_hold_is_told_with_what_would_be_allowed() -> None:
    assert wait_reasons.occupied("G0", 9216.0, 1024.0).text == "processes outside gpuyard hold 9 GB of it, over 1 GB"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ReasonKind.TOO_BUSY, "GPU 91% > 80%"),
        (ReasonKind.TOO_HUNGRY, "power 91 W > 80 W"),
        (ReasonKind.TOO_FULL, "GPU memory 91 MB > 80 MB"),
        (ReasonKind.HOST_TOO_BUSY, "CPU 91% > 80%"),
    ],
)
def test_a_figure_over_its_bound_is_told_with_both_and_their_unit(kind: ReasonKind, text: str) -> None:
    told = wait_reasons.over(kind, 91.0, 80.0, "G0")
    assert (told.text, told.had, told.needed, told.device_id) == (text, 91.0, 80.0, "G0")
