"""How fast memory is moved to RAM and back: learned move by move."""

import pytest

from gpuyard.policy.preempt import MoveRates, learn_move, learn_together

RATES = MoveRates(out_mb_s=1500.0, back_mb_s=5000.0, parked_out_mb_s=30000.0, together_mb_s=6000.0)
GB = 1024.0


def test_programs_side_by_side_leave_in_the_time_of_the_largest() -> None:
    alone = RATES.out_s(10 * GB)
    assert RATES.all_out_s([(10 * GB, False)]) == alone
    assert RATES.all_out_s([(10 * GB, False), (8 * GB, False)]) == alone
    assert RATES.all_out_s([(20 * GB, False)]) > 1.5 * alone, "two of 10 GB beat one of 20"


def test_many_side_by_side_share_what_the_machine_moves_in_all() -> None:
    eight = RATES.all_out_s([(10 * GB, False)] * 8)
    assert eight == pytest.approx(0.5 + 80 * GB / 6000.0)
    assert RATES.all_out_s([(10 * GB, True)] * 8) == RATES.out_s(10 * GB, is_parked=True), "no driver moves these"


def test_nothing_to_move_takes_no_time() -> None:
    assert RATES.all_out_s([]) == 0.0


def test_a_rate_follows_a_change_within_a_few_moves() -> None:
    rates = RATES
    for _ in range(5):
        rates = learn_move(rates, 20 * GB, 0.5 + 20 * GB / 4000.0)
    assert rates.out_mb_s == pytest.approx(4000.0, rel=0.05)
    assert rates.back_mb_s == RATES.back_mb_s
    assert rates.parked_out_mb_s == RATES.parked_out_mb_s


def test_each_kind_of_move_has_a_rate_of_its_own() -> None:
    assert learn_move(RATES, 20 * GB, 10.0, is_resumed=True).back_mb_s < RATES.back_mb_s
    assert learn_move(RATES, 20 * GB, 10.0, is_parked=True, is_resumed=True).parked_back_mb_s < RATES.parked_back_mb_s
    assert learn_move(RATES, 20 * GB, 10.0, is_parked=True).parked_out_mb_s < RATES.parked_out_mb_s
    assert learn_together(RATES, 40 * GB, 4.0).together_mb_s > RATES.together_mb_s


def test_several_are_never_slower_together_than_one_alone() -> None:
    assert learn_together(RATES, 40 * GB, 400.0).together_mb_s >= RATES.out_mb_s
    fast = learn_move(RATES, 40 * GB, 1.0)
    assert fast.together_mb_s >= fast.out_mb_s


def test_a_small_move_says_nothing() -> None:
    assert learn_move(RATES, 500.0, 0.4) == RATES
    assert learn_move(RATES, 20 * GB, 0.0) == RATES
