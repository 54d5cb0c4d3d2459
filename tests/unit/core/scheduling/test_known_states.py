"""Device states that outlast a plan: reused while nothing changed, and never different from a new one."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.core.lease import FixedMemory, Lease, Need, WholeDevice
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.known_states import KnownStates
from gpuyard.core.scheduling.placement import PlacementState, PlacementView
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from tests.unit.core.scheduling.test_placement import GB, card, lease, machine

_NEEDS = (Need(), Need(memory=FixedMemory(8 * GB)), Need(devices=2, memory=WholeDevice(20 * GB)))

_IDS = st.sampled_from(["G0", "G1"])
_USED = st.sampled_from([0.0, 4 * GB, 20 * GB])


def leases_on(devices: list[str]) -> tuple[Lease, ...]:
    return tuple(lease(f"l{at}", device, memory_mb=(3 + at) * GB) for at, device in enumerate(devices))


_views = st.builds(
    PlacementView,
    now=st.just(0.0),
    snapshot=st.builds(lambda first, second: machine(card(0, used=first), card(1, used=second)), _USED, _USED),
    leases=st.lists(_IDS, max_size=3).map(leases_on),
    measured=st.dictionaries(
        st.tuples(st.sampled_from(["l0", "l1"]), _IDS), st.sampled_from([None, 0.0, 2 * GB, 9 * GB])
    ),
    loads=st.dictionaries(_IDS, st.sampled_from([None, 40.0, 95.0])),
    packing=st.sampled_from([Packing(), Packing(max_load_percent=90.0), Packing(max_jobs_per_device=1)]),
    closed=st.sampled_from([{}, {"G0": Reason(ReasonKind.DRAINED, "drained", "G0")}]),
)


@given(views=st.lists(_views, min_size=2, max_size=4), reserves=st.booleans())
def test_a_plan_with_what_was_known_before_is_that_without(views: list[PlacementView], reserves: bool) -> None:
    known = KnownStates()
    for view in views:
        remembering, fresh = PlacementState(replace(view, known=known)), PlacementState(view)
        if reserves:
            holder = lease("x", "G0").holder
            assert remembering.reserve(_NEEDS[1], holder) == fresh.reserve(_NEEDS[1], holder)
        for need in _NEEDS:
            assert remembering.find_claim(need) == fresh.find_claim(need)
            assert list(remembering.explain(need)) == list(fresh.explain(need))
        assert remembering.has_capacity() == fresh.has_capacity()


def states_of(known: KnownStates, *leases: Lease, used: float = 0.0, load: float = 10.0) -> dict[str, DeviceState]:
    snapshot = machine(card(0), card(1, used=used))
    return PlacementState(
        PlacementView(now=0.0, snapshot=snapshot, leases=leases, loads={"G0": 10.0, "G1": load}, known=known)
    ).states


def test_a_state_is_used_again_until_its_device_changes() -> None:
    known = KnownStates()
    before = states_of(known, lease("a", "G0", memory_mb=GB))
    assert states_of(known, lease("a", "G0", memory_mb=GB)) == before  # states are equal only if identical
    after = states_of(known, lease("a", "G0", memory_mb=GB), used=GB)
    assert after["G0"] is before["G0"]
    assert after["G1"] is not before["G1"]
    assert states_of(known, lease("a", "G0", memory_mb=2 * GB), used=GB)["G0"] is not before["G0"]
