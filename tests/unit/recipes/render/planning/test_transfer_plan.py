"""The transfer plan: each rule by itself, and all rules in random simulations."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuyard.recipes.render.planning.assets_and_units import (
    Action,
    Asset,
    Budgets,
    Future,
    PlanStep,
    Stage,
    StallCause,
    Unit,
    cannot_fit,
    keys_of,
    limits_of,
    uses_of,
)
from gpuyard.recipes.render.planning.transfer_plan import PlanState, TransferPlan, plan
from tests.scale import seeds
from tests.unit.recipes.render.planning.plan_simulation import (
    Case,
    Pick,
    PlanSimulation,
    actor,
    at_random,
    case_of,
    moving_first,
    scene,
    unit,
    working_first,
)

WORLDS = seeds(60, full=150)
THERE, COMING, LEAVING = Stage.THERE, Stage.COMING, Stage.LEAVING


# Random simulations


@st.composite
def cases(draw: st.DrawFn) -> Case:
    most = draw(st.sampled_from([1, 3, 10, 40]))
    scenes = [scene(number, size) for number, size in enumerate(draw(st.lists(st.integers(1, most), max_size=8)))]
    actors = [actor(number, *sizes) for number, sizes in enumerate(draw(st.lists(_actor_sizes(4 * most), max_size=8)))]
    which = st.tuples(_one_of(scenes), _one_of(actors)).filter(any_of_both)
    pairs = draw(st.lists(which, min_size=1, max_size=40)) if scenes or actors else []
    return Case(
        assets={asset.key: asset for asset in (*scenes, *actors)},
        units=tuple(unit(*pair) for pair in pairs),
        budgets=Budgets(
            vram=draw(_budget([*scenes, *actors])),
            ram=draw(_budget([*scenes, *actors])),
            scene_slots=draw(st.integers(1, 5)),
            working=draw(st.sampled_from([0, 0, 1, most])),
            actors=draw(st.none() | _budget(actors)),
        ),
        workers=draw(st.integers(1, 6)),
        readers=draw(st.integers(1, 4)),
        page=draw(st.sampled_from([1, 1, 4])),
    )


def _actor_sizes(most: int) -> st.SearchStrategy[tuple[int, int]]:
    """Return the actor's bytes and those of its largest frame."""
    return st.integers(1, most).flatmap(lambda nbytes: st.tuples(st.just(nbytes), st.integers(1, nbytes)))


def _one_of(assets: Sequence[Asset]) -> st.SearchStrategy[int | None]:
    return st.sampled_from([None, *range(len(assets))])


def any_of_both(pair: tuple[int | None, int | None]) -> bool:
    return pair != (None, None)


def _budget(assets: Sequence[Asset]) -> st.SearchStrategy[int]:
    """Return a budget: too small for some assets, barely enough, or enough for all."""
    largest = max((asset.nbytes for asset in assets), default=1)
    total = sum(asset.nbytes for asset in assets)
    return st.integers(1, 2 * largest) | st.integers(largest, 3 * largest) | st.integers(1, 1 + 3 * total)


@settings(max_examples=WORLDS)
@given(cases(), st.integers(0, 2**32))
def test_no_plan_exceeds_budgets_moves_assets_in_use_or_gets_stuck(case: Case, seed: int) -> None:
    PlanSimulation(case).run(at_random(seed))


@pytest.mark.no_cover
@pytest.mark.parametrize("pick", [moving_first, working_first])
@settings(max_examples=WORLDS // 2)
@given(cases())
def test_the_same_holds_if_transfers_end_at_once_or_as_late_as_possible(pick: Pick, case: Case) -> None:
    PlanSimulation(case).run(pick)


@pytest.mark.parametrize("pick", [moving_first, working_first, at_random(1)])
def test_a_unit_gets_a_scene_and_an_actor_that_do_not_fit_into_ram_together(pick: Pick) -> None:
    assets = [scene(0, 22), scene(1, 16), actor(0, 32, 12)]
    units = [unit(1, 0), unit(1), unit(0, 0)]
    PlanSimulation(case_of(assets, units, Budgets(vram=60, ram=46), workers=2, readers=1)).run(pick)


def test_memory_freed_for_a_request_is_not_taken_by_other_assets() -> None:
    """Two scenes are evicted for a large one, and neither may return before the large one is loaded."""
    assets = [scene(number, size) for number, size in enumerate((6, 6, 9, 5, 7))]
    units = [unit(number) for number in (3, 4, 2, 0, 1, 3)]
    case = case_of(assets, units, Budgets(vram=13, ram=32), readers=2, page=4)
    assert PlanSimulation(case).run(working_first).downloaded <= 5 + 7 + 9


def test_memory_freed_for_an_actor_is_kept_until_the_actor_fits() -> None:
    assets = [actor(0, 1), actor(1, 5), actor(2, 3, 1), actor(3, 1), actor(4, 1)]
    units = [unit(None, number) for number in (2, 1, 3, 2, 4, 0, 3)]
    PlanSimulation(case_of(assets, units, Budgets(vram=8, ram=5), readers=3)).run(moving_first)


# Rules


def state_of(assets: Sequence[Asset], budgets: Budgets, needed: dict[str, int], **more: Any) -> PlanState:
    ahead = sorted((place, key) for key, place in needed.items())
    known = {asset.key: asset for asset in assets}
    taken = sum(known[key].nbytes for key in more.get("ram", ()))
    limits = limits_of(assets, budgets)

    def next_after(key: str, place: float) -> int | None:
        return needed[key] if key in needed and needed[key] > place else None

    return PlanState(
        limits=limits, assets=known, needed=needed, ahead=ahead, next_after=next_after, ram_taken=taken, **more
    )


def steps_of(assets: Sequence[Asset], budgets: Budgets, needed: dict[str, int], **more: Any) -> tuple[PlanStep, ...]:
    return tuple(plan(state_of(assets, budgets, needed, **more)).steps)


S0, S1, S2 = "scene:s0", "scene:s1", "scene:s2"
A0, A1 = "actor:a0", "actor:a1"
SCENES = [scene(number, 10) for number in range(3)]


def test_assets_are_read_in_order_of_need_and_requested_ones_first() -> None:
    needed = {S0: 2, S1: 1, S2: 0}
    assert steps_of(SCENES, Budgets(vram=100, ram=100), needed, readers=2) == (
        PlanStep(Action.READ, S2),
        PlanStep(Action.READ, S1),
    )
    made = steps_of(SCENES, Budgets(vram=100, ram=100), {S0: 5, S1: 1}, requested={S2: 0}, readers=1)
    assert made == (PlanStep(Action.READ, S2),)


def test_assets_that_are_not_needed_again_are_dropped_unless_they_are_in_use() -> None:
    made = steps_of(SCENES, Budgets(vram=100, ram=100), {}, ram={S0: THERE}, vram={S1: THERE})
    assert set(made) == {PlanStep(Action.DROP_RAM, S0), PlanStep(Action.DROP_VRAM, S1)}
    held = {"ram": {S0: THERE}, "vram": {S1: THERE}, "held": {S1}, "held_ram": {S0}}
    assert steps_of(SCENES, Budgets(vram=100, ram=100), {}, **held) == ()


@pytest.mark.parametrize("stage", [COMING, LEAVING])
def test_an_asset_in_transfer_is_not_touched(stage: Stage) -> None:
    assert steps_of(SCENES, Budgets(vram=100, ram=100), {}, ram={S0: stage}, vram={S1: stage}) == ()


def test_the_scene_needed_last_leaves_vram_and_stays_in_ram() -> None:
    made = steps_of(
        SCENES,
        Budgets(vram=20, ram=100, scene_slots=2),
        {S0: 9, S1: 4},
        requested={S2: 1},
        ram={S2: THERE},
        vram={S0: THERE, S1: THERE},
        now=2,
    )
    assert made == (PlanStep(Action.DEMOTE, S0),)
    made = steps_of(
        SCENES,
        Budgets(vram=20, ram=100, scene_slots=2),
        {S0: 9, S1: 4},
        requested={S2: 1},
        ram={S2: THERE, S0: THERE},
        vram={S0: THERE, S1: THERE},
        now=2,
    )
    assert made == (PlanStep(Action.DROP_VRAM, S0), PlanStep(Action.PROMOTE, S2))


def test_a_request_waits_while_all_slots_or_the_ram_to_read_into_are_in_use() -> None:
    made: TransferPlan = plan(
        state_of(
            SCENES,
            Budgets(vram=100, ram=100, scene_slots=2),
            {},
            requested={S2: 1},
            ram={S2: THERE},
            vram={S0: THERE, S1: THERE},
            held={S0, S1},
        )
    )
    assert (made.steps, made.waits) == ([], {S2: StallCause.SLOT})
    made = plan(
        state_of(
            SCENES, Budgets(vram=100, ram=10), {}, requested={S2: 1}, ram={S0: THERE}, vram={S0: COMING}, held_ram={S0}
        )
    )
    assert (made.steps, made.waits) == ([], {S2: StallCause.RAM})
    needed = dict.fromkeys((S0, S1), 0)
    made = plan(state_of(SCENES[:2], Budgets(vram=100, ram=100), {}, requested=needed, readers=1))
    assert set(made.waits.values()) == {StallCause.DISK}


def test_a_large_asset_is_evicted_before_a_small_asset_needed_slightly_later() -> None:
    assets = [scene(0, 40), scene(1, 4), scene(2, 4)]
    made = steps_of(
        assets,
        Budgets(vram=44, ram=100),
        {S0: 9, S1: 10},
        requested={S2: 1},
        ram={S2: THERE, S0: THERE, S1: THERE},
        vram={S0: THERE, S1: THERE},
        now=2,
    )
    assert made == (PlanStep(Action.DROP_VRAM, S0), PlanStep(Action.PROMOTE, S2))


def test_an_actor_that_does_not_fit_is_streamed() -> None:
    assets = [scene(0, 10), actor(0, 50, 2)]
    needs = {"requested": {A0: 0}}
    assert steps_of(assets, Budgets(vram=40, ram=100), {}, **needs) == (PlanStep(Action.READ, A0),)
    made = plan(state_of(assets, Budgets(vram=40, ram=100), {}, ram={A0: THERE}, **needs))
    assert (made.steps, made.streams) == ([], {A0})
    made = plan(state_of([actor(0, 50, 2)], Budgets(vram=100, ram=40), {}, requested={A0: 0}))
    assert (made.steps, made.streams) == ([], {A0})
    made = plan(
        state_of(
            [actor(0, 30, 2), actor(1, 30, 2)],
            Budgets(vram=54, ram=100),
            {},
            requested={A1: 1},
            ram={A1: THERE},
            vram={A0: THERE},
            held={A0},
        )
    )
    assert (made.steps, made.streams) == ([], {A1})


def test_a_second_stream_waits_for_vram_and_for_the_budget_of_actors() -> None:
    state = state_of([actor(0, 50, 10)], Budgets(vram=20, ram=100), {}, requested={A0: 0}, ram={A0: THERE})
    assert plan(state).streams == {A0}
    state.stream_nbytes, state.held_ram = 20, frozenset({A0})
    assert plan(state).waits == {A0: StallCause.VRAM}
    assert not plan(state).streams
    assets = [actor(0, 50, 10), actor(1, 50, 10)]
    streaming = {"requested": {A1: 0}, "ram": {A1: THERE}, "held_ram": frozenset({A0})}
    state = state_of(assets, Budgets(vram=200, ram=200, actors=30), {}, stream_nbytes=20, **streaming)
    assert (plan(state).streams, plan(state).waits) == (set(), {A1: StallCause.VRAM})
    state = state_of(assets, Budgets(vram=200, ram=200, actors=40), {}, stream_nbytes=20, **streaming)
    assert plan(state).streams == {A1}


def test_assets_are_promoted_ahead_of_time_unless_memory_is_short() -> None:
    ready: dict[str, Any] = {"needed": {S0: 0}, "ram": {S0: THERE}}
    assert steps_of(SCENES, Budgets(vram=100, ram=100), **ready) == (PlanStep(Action.PROMOTE, S0),)
    assert steps_of(SCENES, Budgets(vram=100, ram=100), **ready, is_short=True) == ()
    assert steps_of(SCENES, Budgets(vram=100, ram=100), **ready, refused={S0}) == ()
    made = steps_of(SCENES, Budgets(vram=20, ram=100, scene_slots=2), {S0: 0}, ram={S0: THERE})
    assert made == (PlanStep(Action.PROMOTE, S0),)


def test_copies_in_vram_and_actors_not_needed_soon_leave_ram_first() -> None:
    made = steps_of(
        SCENES,
        Budgets(vram=100, ram=20),
        {S0: 1, S1: 50},
        requested={S2: 0},
        ram={S0: THERE, S1: THERE},
        vram={S0: THERE},
        held={S0},
    )
    assert made[:2] == (PlanStep(Action.DROP_RAM, S0), PlanStep(Action.READ, S2))
    assets = [scene(0, 10), scene(1, 10), actor(0, 10, 1)]
    state = {"requested": {S1: 0}, "ram": {S0: THERE, A0: THERE}, "is_short": True}
    assert steps_of(assets, Budgets(vram=100, ram=20), {S0: 40, A0: 20}, **state) == (
        PlanStep(Action.DROP_RAM, A0),
        PlanStep(Action.READ, S1),
    )


# Limits


def test_actors_share_what_the_largest_scenes_and_a_stream_of_two_frames_leave() -> None:
    assets = [scene(0, 10), scene(1, 30), scene(2, 20), actor(0, 40, 3)]
    limits = limits_of(assets, Budgets(vram=100, ram=500, scene_slots=2, working=10))
    assert (limits.stream, limits.vram, limits.actors) == (6, 84, 34)
    assert actor(0, 100, 90).stream_nbytes == 180
    assert actor(0, 90, 90).stream_nbytes == 90


def test_a_budget_for_actors_limits_them_and_their_streams_and_leaves_scenes_alone() -> None:
    assets = [scene(0, 10), actor(0, 40, 3), actor(1, 25, 12)]
    limits = limits_of(assets, Budgets(vram=100, ram=500, actors=30))
    assert (limits.stream, limits.vram, limits.actors) == (24, 76, 6)
    assert limits_of(assets, Budgets(vram=100, ram=500, actors=500)) == limits_of(assets, Budgets(vram=100, ram=500))
    assert cannot_fit(assets[1], limits_of(assets, Budgets(vram=100, ram=500, actors=5)), int) == (
        "a0: two of its frames are larger than the VRAM budget for actors"
    )


@pytest.mark.parametrize(
    ("asset", "reason"),
    [
        (scene(0, 95), "s0 is larger than the VRAM budget for assets"),
        (scene(0, 85), None),
        (scene(0, 60), None),
        (actor(0, 1000, 50), "a0: two of its frames are larger than the VRAM budget for actors"),
        (actor(0, 1000, 45), None),
    ],
)
def test_an_asset_that_can_never_fit_is_reported_with_the_reason(asset: Asset, reason: str | None) -> None:
    limits = limits_of([asset], Budgets(vram=100, ram=90, working=10))
    assert cannot_fit(asset, limits, int) == reason


def test_a_scene_must_fit_into_ram_in_whole_pages() -> None:
    limits = limits_of([scene(0, 85)], Budgets(vram=100, ram=90))
    assert cannot_fit(scene(0, 85), limits, lambda nbytes: -(-nbytes // 16) * 16) == "s0 is larger than the RAM budget"


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


def test_a_units_scene_is_needed_first_and_an_unusable_asset_never_again() -> None:
    first, second = uses_of(0, unit(0, 0)), uses_of(1, unit(1, 1))
    assert first[S0] < first[A0] < min(second.values())
    future = Future([unit(0, 0), unit(1, 0), unit(0, 0)])
    future.forget(A0)
    future.forget(A0)
    assert future.needed.keys() == {S0, S1}
    future.hand_out()
    assert future.needed.keys() == {S0, S1}
    assert {key for _, key in future.ahead} == {S0, S1}
