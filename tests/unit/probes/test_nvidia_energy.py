"""Energy counters that are asked for seldom: right over time, never falling, and asked no more often than promised."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.probes.nvidia.nvml_health_and_energy import ASK_RARELY_S, EnergyCounters


class Driver:
    """A counter that tells how often it was asked."""

    def __init__(self, joules: float | None) -> None:
        self.joules = joules
        self.asked = 0

    def __call__(self) -> float | None:
        self.asked += 1
        return self.joules


def reader(driver: Driver) -> Callable[[float | None, float], float | None]:
    counters = EnergyCounters()
    return lambda power_w, now: counters.read("GPU-1", power_w, now, driver)


def test_between_two_answers_ten_seconds_apart_the_power_continues_the_counter() -> None:
    driver = Driver(500.0)
    read = reader(driver)
    assert read(100.0, 0.0) == 500.0
    assert read(300.0, 1.0) == 700.0
    assert read(300.0, 3.0) == 1300.0
    assert driver.asked == 1
    driver = Driver(0.0)
    read = reader(driver)
    read(100.0, 0.0)
    driver.joules = 1_234.0
    assert read(100.0, ASK_RARELY_S) == 1_234.0
    assert driver.asked == 2


def test_a_power_that_said_too_much_is_made_good_and_no_reading_falls() -> None:
    driver = Driver(0.0)
    read = reader(driver)
    read(100.0, 0.0)
    assert read(100.0, 9.0) == 900.0
    driver.joules = 850.0
    assert read(100.0, 10.0) == 900.0
    assert read(100.0, 10.4) == 900.0
    assert read(100.0, 11.0) == 950.0
    driver = Driver(1_000.0)
    read = reader(driver)
    read(100.0, 0.0)
    driver.joules = 20.0
    assert read(100.0, 10.0) == 20.0


def test_without_a_counter_there_is_no_energy_and_without_power_it_is_asked_each_time() -> None:
    assert reader(Driver(None))(100.0, 0.0) is None
    driver = Driver(10.0)
    read = reader(driver)
    assert [read(None, 0.0), read(None, 1.0), read(50.0, 2.0)] == [10.0, 10.0, 10.0]
    assert driver.asked == 3


def test_each_card_has_its_own_counter() -> None:
    counters = EnergyCounters()
    counters.read("GPU-1", 100.0, 0.0, lambda: 5.0)
    assert counters.read("GPU-2", 100.0, 1.0, lambda: 70.0) == 70.0
    assert counters.read("GPU-1", 100.0, 1.0, lambda: 0.0) == 105.0


steps = st.lists(st.tuples(st.floats(0.05, 20.0), st.floats(0.0, 700.0), st.floats(0.0, 700.0)), max_size=60)


@given(steps)
def test_readings_never_fall_and_are_the_counter_wherever_it_is_ahead(steps: list[tuple[float, float, float]]) -> None:
    """Whatever the power says, compared with what the card really draws."""
    driver = Driver(0.0)
    read = reader(driver)
    now, joules, last = 0.0, 0.0, read(100.0, 0.0) or 0.0
    for seconds, said_w, true_w in steps:
        now, joules, asked = now + seconds, joules + seconds * true_w, driver.asked
        driver.joules = joules
        reading = read(said_w, now)
        assert reading is not None
        assert reading >= last
        if driver.asked > asked:
            assert reading == max(joules, last)
        last = reading
