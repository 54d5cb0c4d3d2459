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
    eight = RATES.all_out_s([(10 * GB, False)] * 8)
    assert eight == pytest.approx(0.5 + 80 * GB / 6000.0), "many side by side share what the machine moves in all"
    assert RATES.all_out_s([(10 * GB, True)] * 8) == RATES.out_s(10 * GB, is_parked=True), "no driver moves these"
    assert RATES.all_out_s([]) == 0.0, "nothing to move takes no time"


def test_rates_are_learned_by_kind_of_move() -> None:
    rates = RATES
    for _ in range(5):
        rates = learn_move(rates, 20 * GB, 0.5 + 20 * GB / 4000.0)
    assert rates.out_mb_s == pytest.approx(4000.0, rel=0.05)
    assert rates.back_mb_s == RATES.back_mb_s
    assert rates.parked_out_mb_s == RATES.parked_out_mb_s, "a rate follows a change within a few moves"
    # Each kind of move has a rate of its own.
    assert learn_move(RATES, 20 * GB, 10.0, is_resumed=True).back_mb_s < RATES.back_mb_s
    assert learn_move(RATES, 20 * GB, 10.0, is_parked=True, is_resumed=True).parked_back_mb_s < RATES.parked_back_mb_s
    assert learn_move(RATES, 20 * GB, 10.0, is_parked=True).parked_out_mb_s < RATES.parked_out_mb_s
    assert learn_together(RATES, 40 * GB, 4.0).together_mb_s > RATES.together_mb_s
    assert learn_together(RATES, 40 * GB, 400.0).together_mb_s >= RATES.out_mb_s
    fast = learn_move(RATES, 40 * GB, 1.0)
    assert fast.together_mb_s >= fast.out_mb_s, "several are never slower together than one alone"
    assert learn_move(RATES, 500.0, 0.4) == RATES
    assert learn_move(RATES, 20 * GB, 0.0) == RATES, "a small move says nothing"
