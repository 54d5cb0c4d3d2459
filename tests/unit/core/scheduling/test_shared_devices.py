"""The best shared device is found without checking all."""

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.lease import FixedMemory, Holder, Need, Share
from gpuyard.core.scheduling.device_fit import Packing, check_capacity
from gpuyard.core.scheduling.device_memory import DeviceState, PromisedShare
from gpuyard.core.scheduling.shared_devices import SharedDevices, placement_cost
from gpuyard.core.snapshot import Device, Vendor

ME = Holder(uid=1000, user="me", pid=1)
loads = st.none() | st.sampled_from([0.0, 20.0, 30.1, 69.9, 100.0])
sizes = st.sampled_from([1000.0, 5000.0, 12_000.0])


@st.composite
def promises(draw: st.DrawFn) -> PromisedShare:
    is_reservation = draw(st.booleans())
    share = Share(
        device_id="", memory_mb=draw(sizes), load_percent=draw(loads), is_exclusive=draw(st.integers(0, 9)) == 0
    )
    return PromisedShare(
        share=share,
        holder=ME,
        measured_mb=None if is_reservation else draw(st.sampled_from([0.0, 2000.0])),
        is_reservation=is_reservation,
    )


@st.composite
def states(draw: st.DrawFn) -> list[DeviceState]:
    found = []
    for number in range(draw(st.integers(1, 6))):
        total = draw(st.none() | st.sampled_from([8000.0, 24_000.0]))
        device = Device(
            id=f"G{number}", vendor=Vendor.NVIDIA, index=draw(st.none() | st.integers(0, 3)), memory_total_mb=total
        )
        found.append(DeviceState(device, draw(st.lists(promises(), max_size=3)), draw(loads)))
    return found


needs = st.builds(
    lambda memory_mb, load: Need(memory=FixedMemory(memory_mb), load_percent=load),
    sizes.map(lambda size: size or 0.0),
    loads,
)
packings = st.builds(
    lambda jobs, load: Packing(max_jobs_per_device=jobs, max_load_percent=load),
    st.none() | st.integers(1, 3),
    st.none() | st.sampled_from([100.0, 150.0]),
)


def the_best(need: Need, packing: Packing, among: list[DeviceState]) -> DeviceState | None:
    fitting = [state for state in among if not state.is_exclusive and check_capacity(need, state, packing) is None]
    return min(fitting, key=lambda state: placement_cost(need, state), default=None)


@given(states(), needs, packings)
def test_the_best_device_is_the_one_that_checking_all_would_find(
    among: list[DeviceState], need: Need, packing: Packing
) -> None:
    assert SharedDevices(among).best(need, packing) is the_best(need, packing, among)


def test_exactly_as_much_as_is_free_is_enough() -> None:
    state = DeviceState(Device(id="G0", vendor=Vendor.NVIDIA, index=0, memory_total_mb=8000.0), (), None)
    assert SharedDevices([state]).best(Need(memory=FixedMemory(8000.0)), Packing()) is state
    assert SharedDevices([state]).best(Need(memory=FixedMemory(8000.1)), Packing()) is None


@given(states(), needs, packings, promises(), st.integers(0, 5))
def test_a_replaced_state_is_found(
    among: list[DeviceState], need: Need, packing: Packing, promise: PromisedShare, place: int
) -> None:
    devices = SharedDevices(among)
    before = among[place % len(among)]
    after = before.with_promise(promise)
    devices.replace(before, after)
    changed = [after if state is before else state for state in among]
    assert devices.best(need, packing) is the_best(need, packing, changed)
