"""Queue time is steady whatever happens to the wall clock, and shown times are right by the clock of now."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.queue_time import STEP_S, QueueTime, start_queue_time

NOW = 1_763_000_000.0
DAY_S = 86_400.0


class Machine:
    """A machine with a daemon: true time passes, the wall clock is set, the daemon and the machine restart."""

    def __init__(self, wrong_s: float = 0.0) -> None:
        self.true = NOW
        self.wrong_s = wrong_s
        self.boot = 1
        self.booted_at = NOW - 1000.0
        self.latest: float | None = None
        self.record: QueueTime | None = None
        self.restart()

    @property
    def wall(self) -> float:
        return self.true + self.wrong_s

    @property
    def since_boot(self) -> float:
        return self.true - self.booted_at

    def restart(self) -> None:
        self.record = start_queue_time(self.record, str(self.boot), self.since_boot, self.wall, self.latest)

    def reboot(self, wrong_s: float) -> None:
        self.boot, self.booted_at, self.wrong_s = self.boot + 1, self.true, wrong_s
        self.restart()

    def look(self) -> QueueTime:
        assert self.record is not None
        self.record = self.record.noticing(self.since_boot, self.wall)
        return self.record

    def now(self) -> float:
        """Return queue time, and store something at it."""
        assert self.record is not None
        self.latest = self.record.offset + self.since_boot
        return self.latest


_sizes = st.sampled_from((1.0, 60.0, DAY_S, 56 * 365 * DAY_S)).flatmap(lambda most: st.floats(-most, most))
_events = st.lists(
    st.tuples(st.sampled_from(("pass", "step", "restart", "look")), _sizes, st.floats(0.0, 2 * DAY_S)), max_size=20
)


@given(events=_events, wrong_s=_sizes)
def test_queue_time_passes_like_true_time(events: list[tuple[str, float, float]], wrong_s: float) -> None:
    machine = Machine(wrong_s)
    moments = [(machine.now(), machine.true)]
    for kind, step_s, seconds in events:
        machine.true += seconds
        if kind == "step":
            machine.wrong_s += step_s
        elif kind == "restart":
            machine.restart()
        elif kind == "look":
            machine.look()
        moments.append((machine.now(), machine.true))
    record = machine.look()
    for at, true in moments:
        assert at - moments[0][0] == pytest.approx(true - moments[0][1], abs=1e-3)
        shown_ago_s = machine.wall - record.to_wall(at)
        assert shown_ago_s == pytest.approx(machine.true - true, abs=STEP_S + 1e-3)
        assert record.from_wall(record.to_wall(at)) == pytest.approx(at, abs=1e-3)


@given(wrongs=st.lists(st.tuples(_sizes, _sizes), min_size=1, max_size=6))
def test_queue_time_never_goes_back_over_boots(wrongs: list[tuple[float, float]]) -> None:
    machine = Machine()
    times = [machine.now()]
    for at_boot_s, corrected_s in wrongs:
        machine.true += 60.0
        machine.reboot(at_boot_s)
        times.append(machine.now())
        machine.true += 5.0
        machine.wrong_s = corrected_s
        machine.look()
        times.append(machine.now())
    assert all(earlier <= later for earlier, later in itertools.pairwise(times))


def test_a_machine_that_boots_in_1970_and_is_corrected_shows_true_times_of_both_boots() -> None:
    machine = Machine()
    first = machine.now()
    machine.true += 100.0
    machine.now()
    machine.true += 900.0  # it is off
    machine.reboot(-NOW)
    second = machine.now()
    machine.true += 120.0
    assert machine.now() - second == pytest.approx(120.0)
    machine.wrong_s = 0.0
    record = machine.look()
    assert record.to_wall(first) == pytest.approx(NOW)
    assert record.to_wall(second) == pytest.approx(NOW + 1000.0)
    machine.true += 50.0
    machine.reboot(0.0)
    assert machine.record is not None
    third = machine.now()
    assert [machine.record.to_wall(at) for at in (first, second, third)] == [
        pytest.approx(NOW), pytest.approx(NOW + 1000.0), pytest.approx(NOW + 1170.0)
    ]  # fmt: skip
    assert third - second == pytest.approx(170.0)


def test_a_daemon_without_a_known_boot_continues_by_the_wall_clock() -> None:
    before = start_queue_time(None, "", 500.0, NOW, None)
    after = start_queue_time(before, "", 20.0, NOW + 600.0, NOW + 10.0)
    assert after.offset + 20.0 == pytest.approx(NOW + 600.0)
    before = start_queue_time(None, "boot", 500.0, NOW, None)
    after = start_queue_time(before, "boot", 20.0, NOW + 60.0, NOW + 50.0)
    assert after.offset + 20.0 == pytest.approx(NOW + 60.0), "a record from which time would go back is not continued"
    machine = Machine()
    machine.true += 100.0
    assert machine.now() == pytest.approx(machine.wall), "without steps queue time is the wall clock"
    assert machine.look().to_wall(machine.now()) == pytest.approx(machine.wall)


def test_the_record_does_not_grow_with_the_number_of_boots() -> None:
    machine = Machine()
    for number in range(300):
        machine.now()
        machine.true += 60.0
        machine.reboot(machine.wrong_s)
        machine.wrong_s = 3600.0 * number
        machine.look()
    assert machine.record is not None
    assert len(machine.record.boots) == 100
    assert machine.record.to_wall(machine.now()) == pytest.approx(machine.wall)
    other = Machine()
    for _ in range(300):
        other.true += 60.0
        other.reboot(0.0)
    assert other.record is not None
    assert len(other.record.boots) == 2
