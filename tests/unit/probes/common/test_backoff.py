from gpuyard.probes.run_tool import Backoff


def test_each_consecutive_failure_doubles_the_pause_up_to_a_minute_and_a_success_ends_it() -> None:
    backoff, now, rests = Backoff(), 0.0, []
    for _ in range(9):
        backoff.fail("crashed", now)
        rest = 0.5
        while backoff.is_resting(now + rest):
            rest += 0.5
        rests.append(rest)
        now += rest
    assert rests == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    backoff = Backoff()
    for _ in range(2000):
        backoff.fail("crashed", 100.0)
    assert backoff.is_resting(159.0)
    assert not backoff.is_resting(160.0)
    backoff = Backoff()
    backoff.fail("missing", 100.0)
    assert backoff.is_resting(159.0)
    assert not backoff.is_resting(160.0)
    backoff = Backoff()
    backoff.fail("crashed", 0.0)
    backoff.succeed()
    assert not backoff.is_resting(0.0)
    backoff.fail("crashed", 0.0)
    assert not backoff.is_resting(1.0)
