"""Which devices are read often."""

from gpuyard.model.job import Attempt, Started, Usage
from gpuyard.policy.usage_curve import devices_to_watch, holds_more_than_reserved


def attempt(
    usage: Usage | None = None, devices: tuple[str, ...] = ("G0",), reserved_mb: float | None = None
) -> Attempt:
    return Attempt(job_id=1, number=1, phase=Started(at=1000.0), devices=devices, usage=usage, reserved_mb=reserved_mb)


def used(grew_at_s: float) -> Usage:
    return Usage(peaks_mb={"G0": 4000.0}, grew_at_s=grew_at_s)


def test_the_devices_of_a_growing_first_run_are_read_often() -> None:
    assert devices_to_watch([attempt(used(8.0), ("G0", "G1"))], 1010.0) == {"G0", "G1"}
    assert devices_to_watch([attempt(used(8.0))], 1014.0) == frozenset()
    both = [attempt(used(8.0)), attempt(used(14.0), ("G1",))]
    assert devices_to_watch(both, 1015.0) == {"G1"}


def test_a_program_that_has_not_used_its_device_is_awaited_for_two_minutes() -> None:
    assert devices_to_watch([attempt()], 1100.0) == {"G0"}
    assert devices_to_watch([attempt(Usage(ram_mb=500.0))], 1100.0) == {"G0"}
    assert devices_to_watch([attempt()], 1121.0) == frozenset()


def test_a_job_that_outgrows_its_declared_memory_is_noticed() -> None:
    assert holds_more_than_reserved(attempt(used(0.0), reserved_mb=3000.0))
    assert not holds_more_than_reserved(attempt(used(0.0), reserved_mb=3900.0)), "drivers round"
    assert not holds_more_than_reserved(attempt(used(0.0)))
    assert not holds_more_than_reserved(attempt(reserved_mb=3000.0))
