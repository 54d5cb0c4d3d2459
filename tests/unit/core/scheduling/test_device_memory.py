"""How much room a device has, whatever is promised of it. A card has 24 GB."""

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.lease import Share
from gpuyard.core.scheduling.device_memory import DeviceState, PromisedShare, capacity, charged_mb
from tests.unit.core.scheduling.test_placement import ALICE, CARD, GB, card

sizes = st.sampled_from([None, 0.0, GB, 5 * GB, 9 * GB, 30 * GB])


@st.composite
def rooms(draw: st.DrawFn) -> DeviceState:
    """What is seen on it is no more than there is, and no less than what leases were measured to use."""
    promises = []
    for number in range(draw(st.integers(0, 5))):
        reserved = draw(sizes)
        share = Share(device_id="G0", memory_mb=reserved, is_exclusive=reserved is None)
        measured = draw(st.sampled_from([None, 0.0, GB, 3 * GB, 4.5 * GB]))
        is_reservation = draw(st.integers(0, 4)) == 0
        promises.append(
            PromisedShare(
                share=share,
                holder=ALICE,
                measured_mb=None if is_reservation else measured,
                is_reservation=is_reservation,
                lease_id=None if is_reservation else f"l{number}",
            )
        )
    seen = sum(each.measured_mb or 0.0 for each in promises)
    used = seen + draw(st.floats(0.0, 1.0)) * (CARD - seen)
    return DeviceState(card(0, used=used), promises, None)


def free(room: DeviceState) -> float:
    assert room.free_mb is not None
    return room.free_mb


@given(rooms())
def test_what_is_free_is_neither_a_strangers_nor_promised(room: DeviceState) -> None:
    size, used = capacity(room.device), room.device.memory_used_mb
    assert size is not None
    assert used is not None
    promised = sum(charged_mb(each, size) for each in room.promises)
    known = sum(each.measured_mb or 0.0 for each in room.promises)
    hidden = sum(
        charged_mb(each, size) for each in room.promises if each.measured_mb is None and not each.is_reservation
    )
    assert free(room) <= size - promised
    assert free(room) <= size - promised - max(0.0, used - known - hidden) + 1e-6


@given(rooms(), sizes)
def test_a_promise_never_makes_room(room: DeviceState, size: float | None) -> None:
    share = Share(device_id="G0", memory_mb=size, is_exclusive=size is None)
    after = room.with_promise(PromisedShare(share=share, holder=ALICE, measured_mb=0.0))
    assert free(after) <= free(room) + 1e-6
    assert after.lease_count == room.lease_count + 1
    assert after.is_exclusive >= room.is_exclusive


@given(rooms(), st.data())
def test_whoever_leaves_makes_at_most_the_room_it_was_charged(room: DeviceState, data: st.DataObject) -> None:
    names = [each.lease_id for each in room.promises if each.lease_id is not None]
    gone = frozenset(data.draw(st.lists(st.sampled_from(names), unique=True)) if names else ())
    after = room.without(gone)
    charged = sum(charged_mb(each, CARD) for each in room.promises if each.lease_id in gone)
    assert free(room) - 1e-6 <= free(after) <= free(room) + charged + 1e-6
    assert {each.lease_id for each in after.promises}.isdisjoint(gone)


@given(rooms())
def test_when_all_have_left_only_strangers_are_there(room: DeviceState) -> None:
    empty = room.without()
    used = room.device.memory_used_mb
    assert used is not None
    assert not empty.promises
    assert 0.0 <= CARD - free(empty) <= used + 1e-6
