"""Free memory of a device with any promises. A card has 24 GB."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.lease import Lease, Need, Share
from gpuyard.model.machine_snapshot import Device, Process
from gpuyard.policy.device_state import DeviceState, PromisedShare, capacity, charged_mb, lease_ids
from gpuyard.policy.placement import PlacementChoice, choose
from tests.unit.policy.test_placement import ALICE, CARD, GB, card, devices_of, free_memory, on_cards, shared

sizes = st.sampled_from([None, 0.0, GB, 5 * GB, 9 * GB, 30 * GB])


@st.composite
def states(draw: st.DrawFn) -> DeviceState:
    """Draw a device. Its used memory is within its size and covers the measured use of its leases."""
    promises = []
    for number in range(draw(st.integers(0, 5))):
        reserved = draw(sizes)
        share = Share(device_id="G0", memory_mb=reserved, is_exclusive=reserved is None)
        measured = draw(st.sampled_from([None, 0.0, GB, 3 * GB, 4.5 * GB]))
        is_reservation = draw(st.integers(0, 4)) == 0
        promises.append(
            PromisedShare(
                share=share, holder=ALICE, measured_mb=None if is_reservation else measured,
                is_reservation=is_reservation, lease_id=None if is_reservation else f"l{number}",
            )
        )  # fmt: skip
    seen = sum(each.measured_mb or 0.0 for each in promises)
    used = seen + draw(st.floats(0.0, 1.0)) * (CARD - seen)
    return DeviceState(card(0, used=used), promises, None)


def free(state: DeviceState) -> float:
    assert state.free_mb is not None
    return state.free_mb


@given(states())
def test_free_memory_is_neither_foreign_nor_promised(state: DeviceState) -> None:
    size, used = capacity(state.device), state.device.memory_used_mb
    assert size is not None
    assert used is not None
    promised = sum(charged_mb(each, size) for each in state.promises)
    known = sum(each.measured_mb or 0.0 for each in state.promises)
    hidden = sum(
        charged_mb(each, size) for each in state.promises if each.measured_mb is None and not each.is_reservation
    )
    assert free(state) <= size - promised
    assert free(state) <= size - promised - max(0.0, used - known - hidden) + 1e-6
    empty = state.without()
    assert not empty.promises
    assert 0.0 <= CARD - free(empty) <= used + 1e-6, "without leases only foreign memory is charged"
    state = DeviceState(state.device, [*state.promises, *state.promises], None)
    expected = [each.lease_id for each in state.promises if each.lease_id is not None]
    assert lease_ids(state) == expected[: len(expected) // 2], "leases are listed once in the order of their shares"


@given(states(), sizes)
def test_a_promise_never_frees_memory(state: DeviceState, size: float | None) -> None:
    share = Share(device_id="G0", memory_mb=size, is_exclusive=size is None)
    after = state.with_promise(PromisedShare(share=share, holder=ALICE, measured_mb=0.0))
    assert free(after) <= free(state) + 1e-6
    assert after.lease_count == state.lease_count + 1
    assert after.is_exclusive >= state.is_exclusive


@given(states(), st.data())
def test_a_lease_that_ends_frees_at_most_what_it_was_charged(state: DeviceState, data: st.DataObject) -> None:
    names = [each.lease_id for each in state.promises if each.lease_id is not None]
    gone = frozenset(data.draw(st.lists(st.sampled_from(names), unique=True)) if names else ())
    after = state.without(gone)
    charged = sum(charged_mb(each, CARD) for each in state.promises if each.lease_id in gone)
    assert free(state) - 1e-6 <= free(after) <= free(state) + charged + 1e-6
    assert {each.lease_id for each in after.promises}.isdisjoint(gone)


def unlisted(used: float, processes: tuple[Process, ...] | None = None) -> Device:
    return card(0, used=used, processes=processes)


def test_a_share_records_the_foreign_memory_at_its_grant() -> None:
    [share] = claimed(choose(shared(4 * GB), on_cards(unlisted(2 * GB))))
    assert share.foreign_mb == 2 * GB
    beside = on_cards(
        unlisted(5 * GB),
        leases=(Lease(id="a", holder=ALICE, shares=(share,), since=0.0),),
        measured={("a", "G0"): 3 * GB},
    )
    [second] = claimed(choose(shared(4 * GB), beside))
    assert second.foreign_mb == 2 * GB, "never the use of a lease"
    [share] = claimed(choose(shared(4 * GB), on_cards(card(0, used=2 * GB))))
    assert share.foreign_mb is None, "where processes are listed nothing is noted since each is seen"


@pytest.mark.parametrize(("used", "free"), [(5.0, 18.0), (9.0, 15.0), (1.0, 19.0)])
def test_earlier_foreign_memory_does_not_count_as_use_of_a_reservation(used: float, free: float) -> None:
    """The desktop has 2 GB, and the lease is for 4 GB. Use beyond both is foreign, too."""
    share = Share(device_id="G0", memory_mb=4 * GB, is_exclusive=False, foreign_mb=2 * GB)
    leases = (Lease(id="a", holder=ALICE, shares=(share,), since=0.0),)
    device = unlisted(used * GB)
    assert free_memory(device, on_cards(device, leases=leases)) == free * GB


@pytest.mark.parametrize(("device", "starts"), [
    (unlisted(1.8 * GB), True), (unlisted(1.8 * GB, ()), True), (unlisted(13 * GB), False),
    (card(0, used=1.8 * GB), False),
])  # fmt: skip
def test_where_processes_are_hidden_an_exclusive_device_may_have_a_desktop_on_it(device: Device, starts: bool) -> None:
    assert bool(devices_of(choose(Need(), on_cards(device)))) is starts


def claimed(choice: PlacementChoice) -> tuple[Share, ...]:
    assert choice.claim is not None
    return choice.claim.shares
