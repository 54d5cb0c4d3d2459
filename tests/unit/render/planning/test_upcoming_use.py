"""Upcoming use: which units are handed out, and when each asset is needed next."""

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.recipes.render.planning.assets_and_units import Future, Unit, keys_of, uses_of
from tests.unit.render.plan_simulation import unit

S0, S1, A0 = "scene:s0", "scene:s1", "actor:a0"
numbers = st.none() | st.integers(0, 4)


def soonest(units: list[Unit], handed: int) -> dict[str, int]:
    """Return the next use of each asset, by scanning all remaining units."""
    found: dict[str, int] = {}
    for number, each in enumerate(units):
        for key, place in uses_of(number, each).items():
            if number >= handed:
                found.setdefault(key, place)
    return found


@given(st.lists(st.builds(unit, numbers, numbers), max_size=30))
def test_units_are_handed_out_once_in_order_and_the_rest_is_known(units: list[Unit]) -> None:
    future = Future(units)
    for number, each in enumerate(units):
        assert future.needed == soonest(units, number)
        assert future.ahead == sorted((place, key) for key, place in future.needed.items())
        assert all(place >= future.now for place in future.needed.values())
        for key in (S0, A0):
            assert future.count_uses(key) == sum(key in keys_of(left) for left in units[number:])
        assert future.hand_out() == (number, each)
    assert (future.needed, future.ahead, future.hand_out()) == ({}, [], None)


def test_a_units_scene_is_needed_before_its_actor_and_both_before_the_next_unit() -> None:
    first, second = uses_of(0, unit(0, 0)), uses_of(1, unit(1, 1))
    assert first[S0] < first[A0] < min(second.values())


def test_an_unusable_asset_is_forgotten_permanently() -> None:
    future = Future([unit(0, 0), unit(1, 0), unit(0, 0)])
    future.forget(A0)
    future.forget(A0)
    assert future.needed.keys() == {S0, S1}
    future.hand_out()
    assert future.needed.keys() == {S0, S1}
    assert {key for _, key in future.ahead} == {S0, S1}
