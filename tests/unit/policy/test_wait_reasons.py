import pytest

from gpuyard.model.lease import Holder, Need, Share
from gpuyard.policy import wait_reasons
from gpuyard.policy.device_state import DeviceState, PromisedShare
from gpuyard.policy.machine import Machine
from gpuyard.policy.placement import PlacementState
from gpuyard.policy.rules import DeviceRule, FreeMemory, Leased, OtherPrograms
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from tests.unit.policy.test_placement import GB, card, machine, shared

ALICE = Holder(uid=1000, user="alice", pid=101, label="train")
BOB = Holder(uid=1001, user="bob", pid=202)


def described(rule: DeviceRule, need: Need, state: DeviceState) -> Reason:
    return rule.describe(need, state, PlacementState(Machine(now=0.0, snapshot=machine(state.device))))


def refusal(rule: DeviceRule, need: Need, *holders: Holder, used: float = 0.0) -> Reason:
    """The reason of this rule on a card of 24 GB that the holders have leased."""
    leases = [PromisedShare(share=Share(device_id="G0"), holder=holder, lease_id="a") for holder in holders]
    return described(rule, need, DeviceState(card(0, used=used), leases, None))


def test_a_holder_is_named_by_user_pid_and_label() -> None:
    assert wait_reasons.describe_holder(ALICE) == "alice, pid 101 (train)"
    assert wait_reasons.describe_holder(BOB) == "bob, pid 202"


def test_several_holders_are_all_named() -> None:
    reason = refusal(Leased(), Need(), ALICE, BOB)
    assert reason.text == "held by alice, pid 101 (train); bob, pid 202"
    assert reason.holders == (ALICE, BOB)
    assert wait_reasons.awaited("G0", (BOB,)).text == "reserved for bob, pid 202, ahead in the queue"


def test_overdrawn_memory_is_shown_as_zero() -> None:
    reason = refusal(FreeMemory(), shared(2 * GB), ALICE, BOB)
    assert reason.text == "0 MB free, 2 GB needed: 48 GB kept for alice, pid 101 (train); bob, pid 202"
    assert (reason.had, reason.needed) == (-24 * GB, 2 * GB)


@pytest.mark.parametrize(
    ("reserved_mb", "used_mb", "is_leased"),
    [(20 * GB, 0.0, True), (20 * GB, 23 * GB, True), (10 * GB, 23 * GB, False), (None, 0.0, True)],
)
def test_memory_that_leases_reserve_is_told_from_memory_in_use(
    reserved_mb: float | None, used_mb: float, *, is_leased: bool
) -> None:
    share = Share(device_id="G0", memory_mb=reserved_mb, is_exclusive=False)
    lease = PromisedShare(share=share, holder=ALICE, lease_id="a")
    state = DeviceState(card(0, used=used_mb), [lease], None)
    assert described(FreeMemory(), shared(8 * GB), state).is_leased is is_leased


def test_foreign_memory_is_shown_with_its_limit() -> None:
    reason = refusal(OtherPrograms(), Need(), used=9 * GB)
    assert reason.text == "processes outside gpuyard hold 9 GB of it, over 1.2 GB"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ReasonKind.TOO_BUSY, "GPU 91% > 80%"),
        (ReasonKind.POWER_LIMIT, "power 91 W > 80 W"),
        (ReasonKind.TOO_FULL, "GPU memory 91 MB > 80 MB"),
        (ReasonKind.HOST_TOO_BUSY, "CPU 91% > 80%"),
    ],
)
def test_a_figure_over_its_limit_is_shown_with_both_and_their_unit(kind: ReasonKind, text: str) -> None:
    reason = wait_reasons.over(kind, 91.0, 80.0, "G0")
    assert (reason.text, reason.had, reason.needed, reason.device_id) == (text, 91.0, 80.0, "G0")
