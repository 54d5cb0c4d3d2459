"""Climbs that skip readings while memory stays the same are those of climbs that note each reading."""

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.memory.memory_climbs import HeldMemory, MemoryClimbs
from gpuyard.core.memory.memory_guard import MemoryClimb

_KEY = (1, 1)
_HELD = st.fixed_dictionaries({"G0": st.sampled_from([0.0, 1000.0, 1000.0, 1000.0, 2000.0, None])})
_BOTH = st.fixed_dictionaries({each: st.sampled_from([500.0, 500.0, 500.0, 900.0, None]) for each in ("G0", "G1")})
_readings = st.lists(
    st.tuples(
        st.sampled_from([0.1, 0.5, 1.0, 1.0, 1.2, 30.0]),
        st.one_of(_HELD, _BOTH),
        st.sampled_from([frozenset(), frozenset(), frozenset(), frozenset({"G0"}), frozenset({"G9"})]),
    ),
    min_size=1,
    max_size=40,
)


@given(readings=_readings, began_at=st.sampled_from([None, 100.0]))
def test_a_climb_is_that_of_all_its_readings(
    readings: list[tuple[float, HeldMemory, frozenset[str]]], began_at: float | None
) -> None:
    climbs, now = MemoryClimbs(), 100.0
    expected: dict[str, MemoryClimb] = {}
    for seconds, held, reread in readings:
        now += seconds
        climbs.start_reading(now, reread)
        climbs.note(_KEY, held, now, reread, began_at)
        for device_id, held_mb in held.items():
            if held_mb is None:
                expected.pop(device_id, None)
            elif not reread or device_id in reread:
                expected[device_id] = expected.get(device_id, MemoryClimb()).add(now, held_mb, began_at)
        for device_id in ("G0", "G1"):
            climb, whole = climbs.on(_KEY, device_id) or MemoryClimb(), expected.get(device_id, MemoryClimb())
            assert (climb.held_mb, climb.rate_mb_s, climb.steady_mb_s) == (
                whole.held_mb,
                whole.rate_mb_s,
                whole.steady_mb_s,
            )
        growing = {device_id for device_id, climb in expected.items() if climb.rate_mb_s}
        assert climbs.growing.get(_KEY, set()) == growing


def test_attempts_of_ended_jobs_are_forgotten() -> None:
    climbs = MemoryClimbs()
    climbs.start_reading(0.0, ())
    for key in ((1, 1), (2, 1)):
        climbs.note(key, {"G0": 100.0}, 0.0, (), None)
    climbs.keep({2})
    assert climbs.on((1, 1), "G0") is None
    assert climbs.on((2, 1), "G0") is not None
