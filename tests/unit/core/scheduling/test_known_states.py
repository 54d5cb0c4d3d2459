"""Device states that outlast a plan: reused while nothing changed, and never different from a new one."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.core.lease import FixedMemory, HostShare, Lease, Need, UncertainMemory, WholeDevice
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.host_capacity import HostUse, HostView
from gpuyard.core.scheduling.known_states import KnownStates
from gpuyard.core.scheduling.placement import PlacementState, PlacementView
from gpuyard.core.scheduling.sharing import depth_limit
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.snapshot import Host
from tests.unit.core.scheduling.test_placement import GB, card, lease, machine

_NEEDS = (
    Need(),
    Need(memory=FixedMemory(8 * GB)),
    Need(devices=2, memory=WholeDevice(20 * GB)),
    Need(devices=2, memory=FixedMemory(3 * GB), load_percent=60.0),
    Need(memory=UncertainMemory(6 * GB, 4 * GB, 2 * GB), load_percent=30.0),
    Need(memory=FixedMemory(2 * GB), max_memory_used_mb=3 * GB),
    Need(memory=FixedMemory(2 * GB), load_percent=40.0, ignores_depth=True),
    Need(memory=FixedMemory(GB), host=HostShare(ram_mb=8 * GB, cpus=4.0)),
    Need(devices=0, host=HostShare(ram_mb=12 * GB)),
)

_IDS = st.sampled_from(["G0", "G1"])
_USED = st.sampled_from([0.0, 4 * GB, 20 * GB])
_AVAILABLE = st.sampled_from([3 * GB, 11 * GB, 16 * GB, 22 * GB])


def leases_on(devices: list[str]) -> tuple[Lease, ...]:
    host = HostShare(ram_mb=4 * GB, cpus=2.0)
    leases = (lease(f"l{at}", device, memory_mb=(3 + at) * GB) for at, device in enumerate(devices))
    return tuple(replace(each, host=host) for each in leases)


def host_with(available_mb: float) -> Host:
    return Host(memory_total_mb=24 * GB, memory_available_mb=available_mb, cpu_count=8.0)


_views = st.builds(
    PlacementView,
    now=st.just(0.0),
    snapshot=st.builds(
        lambda first, second, free: machine(card(0, used=first), card(1, used=second), host=host_with(free)),
        _USED,
        _USED,
        _AVAILABLE,
    ),
    host=st.dictionaries(st.sampled_from(["l0", "l1"]), st.sampled_from([HostUse(), HostUse(ram_mb=9 * GB)])).map(
        lambda used: HostView(used=used)
    ),
    leases=st.lists(_IDS, max_size=3).map(leases_on),
    measured=st.dictionaries(
        st.tuples(st.sampled_from(["l0", "l1"]), _IDS), st.sampled_from([None, 0.0, 2 * GB, 9 * GB])
    ),
    loads=st.dictionaries(_IDS, st.sampled_from([None, 40.0, 95.0])),
    packing=st.sampled_from(
        [
            Packing(),
            Packing(max_load_percent=90.0),
            Packing(max_jobs_per_device=1),
            Packing(depth=depth_limit(3, 2)),
        ]
    ),
    lease_loads=st.sampled_from([{}, {"l0": 90.0, "l1": 60.0}]),
    closed=st.sampled_from([{}, {"G0": Reason(ReasonKind.DRAINED, "drained", "G0")}]),
)


@settings(max_examples=300)
@given(views=st.lists(_views, min_size=2, max_size=5), head=st.sampled_from([None, *_NEEDS]))
def test_a_plan_with_what_was_known_before_is_that_without(views: list[PlacementView], head: Need | None) -> None:
    known = KnownStates()
    for view in views:
        _answer_alike(PlacementState(replace(view, known=known)), PlacementState(view), head)


@settings(max_examples=300)
@given(
    view=_views, used=st.lists(st.tuples(_USED, _USED), min_size=2, max_size=6), measured=st.lists(_USED, min_size=6)
)
def test_answers_follow_what_is_measured(
    view: PlacementView, used: list[tuple[float, float]], measured: list[float]
) -> None:
    known = KnownStates()
    for (first, second), held in zip(used, measured, strict=False):
        snapshot = machine(card(0, used=first), card(1, used=second))
        now = replace(view, snapshot=snapshot, measured={("l0", "G0"): held, ("l1", "G1"): held})
        _answer_alike(PlacementState(replace(now, known=known)), PlacementState(now), None)


def _answer_alike(remembering: PlacementState, fresh: PlacementState, head: Need | None) -> None:
    holder = lease("x", "G0").holder
    for need in (*_NEEDS, *_NEEDS):
        claim = remembering.find_claim(need)
        assert claim == fresh.find_claim(need)
        assert list(remembering.explain(need)) == list(fresh.explain(need))
        assert remembering.first_available(need, {"l0": 5.0}) == fresh.first_available(need, {"l0": 5.0})
        if claim is not None and need is _NEEDS[1]:
            remembering.add_claim(claim, holder, "x")
            fresh.add_claim(claim, holder, "x")
    if head is not None:
        remembering, fresh = remembering.copy(), fresh.copy()
        assert remembering.reserve(head, holder) == fresh.reserve(head, holder)
        _answer_alike(remembering, fresh, None)
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


def test_ram_that_is_free_again_is_noticed_although_no_device_has_changed() -> None:
    known, need = KnownStates(), Need(memory=FixedMemory(GB), host=HostShare(ram_mb=8 * GB))
    view = PlacementView(now=0.0, snapshot=machine(card(0), host=host_with(9 * GB)), known=known)
    refused = PlacementState(view)
    assert refused.find_claim(need) is None
    assert [reason.kind for reason in refused.explain(need)] == [ReasonKind.HOST_MEMORY]
    later = replace(view, snapshot=replace(view.snapshot, host=host_with(11 * GB)))
    assert PlacementState(later).find_claim(need) is not None
