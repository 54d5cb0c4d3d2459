"""The plan: its rules one by one, and in random worlds."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuyard.residency.planning.assets import (
    Asset,
    Budgets,
    Demote,
    DropRam,
    DropVram,
    Promote,
    Read,
    Stage,
    StallCause,
    Step,
)
from gpuyard.residency.planning.budget_limits import cannot_fit, limits_of
from gpuyard.residency.planning.plan_state import PlanState, TransferPlan
from gpuyard.residency.planning.transfer_plan import plan
from tests.scale import seeds
from tests.unit.residency.world import (
    Case,
    Pick,
    World,
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


# Any world


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
        ),
        workers=draw(st.integers(1, 6)),
        readers=draw(st.integers(1, 4)),
        page=draw(st.sampled_from([1, 1, 4])),
    )


def _actor_sizes(most: int) -> st.SearchStrategy[tuple[int, int]]:
    """Its bytes, and those of its largest frame."""
    return st.integers(1, most).flatmap(lambda nbytes: st.tuples(st.just(nbytes), st.integers(1, nbytes)))


def _one_of(assets: Sequence[Asset]) -> st.SearchStrategy[int | None]:
    return st.sampled_from([None, *range(len(assets))])


def any_of_both(pair: tuple[int | None, int | None]) -> bool:
    return pair != (None, None)


def _budget(assets: Sequence[Asset]) -> st.SearchStrategy[int]:
    """Too small for some, hardly enough, or enough for all."""
    largest = max((asset.nbytes for asset in assets), default=1)
    total = sum(asset.nbytes for asset in assets)
    return st.integers(1, 2 * largest) | st.integers(largest, 3 * largest) | st.integers(1, 1 + 3 * total)


@settings(max_examples=WORLDS)
@given(cases(), st.integers(0, 2**32))
def test_no_world_exceeds_its_budgets_or_touches_what_is_in_use_or_comes_to_a_stop(case: Case, seed: int) -> None:
    World(case).run(at_random(seed))


@pytest.mark.no_cover
@pytest.mark.parametrize("pick", [moving_first, working_first])
@settings(max_examples=WORLDS // 2)
@given(cases())
def test_so_it_is_where_all_is_moved_at_once_and_where_nothing_is_moved_in_time(pick: Pick, case: Case) -> None:
    World(case).run(pick)


@pytest.mark.parametrize("pick", [moving_first, working_first, at_random(1)])
def test_a_scene_and_an_actor_that_do_not_fit_into_ram_together_are_had_by_the_same_work(pick: Pick) -> None:
    assets = [scene(0, 22), scene(1, 16), actor(0, 32, 12)]
    units = [unit(1, 0), unit(1), unit(0, 0)]
    World(case_of(assets, units, Budgets(vram=60, ram=46), workers=2, readers=1)).run(pick)


def test_room_that_is_made_for_what_is_asked_for_is_not_taken_by_others() -> None:
    """Two scenes leave for the large one, and neither may come back before both are gone and it is there."""
    assets = [scene(number, size) for number, size in enumerate((6, 6, 9, 5, 7))]
    units = [unit(number) for number in (3, 4, 2, 0, 1, 3)]
    case = case_of(assets, units, Budgets(vram=13, ram=32), readers=2, page=4)
    assert World(case).run(working_first).downloaded <= 5 + 7 + 9


def test_what_becomes_free_for_an_actor_is_not_filled_with_others_before_it_fits() -> None:
    assets = [actor(0, 1), actor(1, 5), actor(2, 3, 1), actor(3, 1), actor(4, 1)]
    units = [unit(None, number) for number in (2, 1, 3, 2, 4, 0, 3)]
    World(case_of(assets, units, Budgets(vram=8, ram=5), readers=3)).run(moving_first)


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


def steps_of(assets: Sequence[Asset], budgets: Budgets, needed: dict[str, int], **more: Any) -> tuple[Step, ...]:
    return plan(state_of(assets, budgets, needed, **more)).steps


S0, S1, S2 = "scene:s0", "scene:s1", "scene:s2"
A0, A1 = "actor:a0", "actor:a1"
SCENES = [scene(number, 10) for number in range(3)]


def test_what_is_needed_first_is_read_first_and_no_more_at_a_time_than_there_are_readers() -> None:
    needed = {S0: 2, S1: 1, S2: 0}
    assert steps_of(SCENES, Budgets(vram=100, ram=100), needed, readers=2) == (Read(S2), Read(S1))


def test_what_is_asked_for_is_read_before_what_is_needed_next() -> None:
    made = steps_of(SCENES, Budgets(vram=100, ram=100), {S0: 5, S1: 1}, requested={S2: 0}, readers=1)
    assert made == (Read(S2),)


def test_assets_that_are_not_needed_again_are_dropped_from_both_tiers() -> None:
    made = steps_of(SCENES, Budgets(vram=100, ram=100), {}, ram={S0: THERE}, vram={S1: THERE})
    assert set(made) == {DropRam(S0), DropVram(S1)}


@pytest.mark.parametrize("stage", [COMING, LEAVING])
def test_what_is_on_its_way_is_left_alone(stage: Stage) -> None:
    assert steps_of(SCENES, Budgets(vram=100, ram=100), {}, ram={S0: stage}, vram={S1: stage}) == ()


def test_an_asset_in_use_stays_even_if_it_is_not_needed_again() -> None:
    held = {"ram": {S0: THERE}, "vram": {S1: THERE}, "held": {S1}, "held_ram": {S0}}
    assert steps_of(SCENES, Budgets(vram=100, ram=100), {}, **held) == ()


def test_the_scene_that_is_needed_last_makes_room_and_is_kept_in_ram() -> None:
    made = steps_of(
        SCENES,
        Budgets(vram=20, ram=100, scene_slots=2),
        {S0: 9, S1: 4},
        requested={S2: 1},
        ram={S2: THERE},
        vram={S0: THERE, S1: THERE},
        now=2,
    )
    assert made == (Demote(S0),)


def test_a_copy_that_is_in_ram_as_well_is_just_dropped_and_its_slot_taken_at_once() -> None:
    made = steps_of(
        SCENES,
        Budgets(vram=20, ram=100, scene_slots=2),
        {S0: 9, S1: 4},
        requested={S2: 1},
        ram={S2: THERE, S0: THERE},
        vram={S0: THERE, S1: THERE},
        now=2,
    )
    assert made == (DropVram(S0), Promote(S2))


def test_a_request_waits_while_all_slots_are_in_use() -> None:
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
    assert (made.steps, made.waits) == ((), {S2: StallCause.SLOT})


def test_a_request_waits_for_ram_to_read_into() -> None:
    made = plan(
        state_of(
            SCENES, Budgets(vram=100, ram=10), {}, requested={S2: 1}, ram={S0: THERE}, vram={S0: COMING}, held_ram={S0}
        )
    )
    assert (made.steps, made.waits) == ((), {S2: StallCause.RAM})


def test_a_large_victim_goes_before_a_small_one_that_is_needed_a_little_later() -> None:
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
    assert made == (DropVram(S0), Promote(S2))


def test_an_actor_over_its_part_of_the_vram_is_streamed_once_it_is_in_ram() -> None:
    assets = [scene(0, 10), actor(0, 50, 2)]
    needs = {"requested": {A0: 0}}
    assert steps_of(assets, Budgets(vram=40, ram=100), {}, **needs) == (Read(A0),)
    made = plan(state_of(assets, Budgets(vram=40, ram=100), {}, ram={A0: THERE}, **needs))
    assert (made.steps, set(made.streams)) == ((), {A0})


def test_an_actor_that_is_larger_than_the_ram_is_streamed_from_disk() -> None:
    made = plan(state_of([actor(0, 50, 2)], Budgets(vram=100, ram=40), {}, requested={A0: 0}))
    assert (made.steps, set(made.streams)) == ((), {A0})


def test_an_actor_that_fits_but_not_beside_those_in_use_is_streamed() -> None:
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
    assert (made.steps, set(made.streams)) == ((), {A1})


def test_a_second_stream_waits_where_there_is_no_room_for_it_beside_the_first() -> None:
    state = state_of([actor(0, 50, 10)], Budgets(vram=20, ram=100), {}, requested={A0: 0}, ram={A0: THERE})
    assert plan(state).streams == {A0}
    state.stream_nbytes, state.held_ram = 20, frozenset({A0})
    assert plan(state).waits == {A0: StallCause.VRAM}
    assert not plan(state).streams


def test_nothing_is_promoted_ahead_of_time_while_memory_is_short() -> None:
    ready: dict[str, Any] = {"needed": {S0: 0}, "ram": {S0: THERE}}
    assert steps_of(SCENES, Budgets(vram=100, ram=100), **ready) == (Promote(S0),)
    assert steps_of(SCENES, Budgets(vram=100, ram=100), **ready, is_short=True) == ()
    assert steps_of(SCENES, Budgets(vram=100, ram=100), **ready, refused={S0}) == ()


def test_a_scene_is_promoted_ahead_of_time_however_little_is_left_for_actors() -> None:
    made = steps_of(SCENES, Budgets(vram=20, ram=100, scene_slots=2), {S0: 0}, ram={S0: THERE})
    assert made == (Promote(S0),)


def test_what_is_in_vram_as_well_is_the_first_to_leave_the_ram() -> None:
    made = steps_of(
        SCENES,
        Budgets(vram=100, ram=20),
        {S0: 1, S1: 50},
        requested={S2: 0},
        ram={S0: THERE, S1: THERE},
        vram={S0: THERE},
        held={S0},
    )
    assert made[:2] == (DropRam(S0), Read(S2))


def test_an_actor_that_is_not_needed_soon_leaves_the_ram_before_a_scene() -> None:
    assets = [scene(0, 10), scene(1, 10), actor(0, 10, 1)]
    room = {"requested": {S1: 0}, "ram": {S0: THERE, A0: THERE}, "is_short": True}
    assert steps_of(assets, Budgets(vram=100, ram=20), {S0: 40, A0: 20}, **room) == (DropRam(A0), Read(S1))


# Room


def test_the_actors_part_is_what_the_largest_scenes_and_one_stream_leave() -> None:
    assets = [scene(0, 10), scene(1, 30), scene(2, 20), actor(0, 40, 3)]
    limits = limits_of(assets, Budgets(vram=100, ram=500, scene_slots=2, working=10))
    assert (limits.stream, limits.vram, limits.actors) == (6, 84, 34)


def test_a_stream_needs_room_for_two_of_its_largest_frames() -> None:
    assert actor(0, 100, 90).stream_nbytes == 180
    assert actor(0, 90, 90).stream_nbytes == 90


@pytest.mark.parametrize(
    ("asset", "says"),
    [
        (scene(0, 95), "s0 is larger than the VRAM budget for assets"),
        (scene(0, 85), None),
        (scene(0, 60), None),
        (actor(0, 1000, 50), "a0: two of its frames are larger than the VRAM budget for assets"),
        (actor(0, 1000, 45), None),
    ],
)
def test_what_can_never_be_had_is_said_with_the_reason(asset: Asset, says: str | None) -> None:
    limits = limits_of([asset], Budgets(vram=100, ram=90, working=10))
    assert cannot_fit(asset, limits, int) == says


def test_a_scene_must_fit_into_ram_in_whole_pages() -> None:
    limits = limits_of([scene(0, 85)], Budgets(vram=100, ram=90))
    assert cannot_fit(scene(0, 85), limits, lambda nbytes: -(-nbytes // 16) * 16) == "s0 is larger than the RAM budget"
