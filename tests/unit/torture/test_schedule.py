"""The faults of a torture run depend on its seed alone."""

from itertools import islice

from tests.torture.schedule import TABLE, planned_faults


def test_the_same_seed_gives_the_same_faults() -> None:
    first, again, other = (list(islice(planned_faults(seed), 100)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_all_faults_come_before_one_comes_again() -> None:
    names = [planned.name for planned in islice(planned_faults(1), len(TABLE))]
    assert sorted(names) == sorted(TABLE)


def test_faults_are_bounded_and_can_be_chosen() -> None:
    planned = list(islice(planned_faults(2), 200))
    assert all(0.0 <= each.lasts_s <= 15.0 and 0.0 <= each.pick < 1.0 for each in planned)
    chosen = {each.name for each in islice(planned_faults(2, ("kill daemon", "fill home")), 10)}
    assert chosen == {"kill daemon", "fill home"}
    meanwhile = {each.meanwhile for each in islice(planned_faults(2, ("kill daemon", "fill home")), 100)}
    assert meanwhile == {None, "kill daemon"}
