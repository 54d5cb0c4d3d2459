"""The energy of attempts as samples arrive: by the card's counter or its power, alone or shared, until the very end."""

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.energy import EnergyUse
from gpuyard.model.job import Started
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Process, Sample
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.measure_usage import EnergyMeter
from gpuyard.queue.transitions import JobTransitions
from tests.unit.policy.test_placement import card, machine
from tests.unit.policy.test_sizing import attempt, job
from tests.unit.queue.test_track_usage import Transitions


def running(job_id: int, since: float = 0.0, *devices: str) -> Live:
    return Live(
        job=replace(job(), id=job_id, state=JobState.RUNNING),
        attempt=replace(
            attempt(), job_id=job_id, lease_id=f"L{job_id}", phase=Started(at=since), devices=devices or ("G0",)
        ),
    )


def sample(at: float, *cards: Device) -> Sample:
    return Sample(snapshot=replace(machine(*cards), taken_at=at))


def powered(index: int, power_w: float | None, energy_j: float | None = None, **changes: Any) -> Device:
    return card(index, power_draw_w=power_w, energy_j=energy_j, **changes)


class Queue:
    """Live attempts, a meter, and the loads that the driver reports."""

    def __init__(self, *lives: Live) -> None:
        self.transitions = Transitions(*lives)
        self.meter = EnergyMeter(cast("JobTransitions", self.transitions))
        self.loads: dict[tuple[str, str], float | None] = {}

    def note(self, at: float, *cards: Device, ended: dict[int, float] | None = None) -> None:
        self.meter.note(sample(at, *cards), self.loads, ended or {})

    def end(self, job_id: int, at: float) -> EnergyUse | None:
        self.meter.settle({job_id: at})
        energy = self.energy(job_id)
        del self.transitions.live[job_id]
        return energy

    def energy(self, job_id: int) -> EnergyUse | None:
        usage = self.transitions.live[job_id].attempt.usage
        return None if usage is None else usage.energy

    def joules(self, job_id: int) -> float:
        energy = self.energy(job_id)
        assert energy is not None
        return energy.joules


def test_an_attempt_alone_gets_the_counter_of_its_card_or_its_power_over_time() -> None:
    queue = Queue(running(1))
    for at in range(6):
        queue.note(float(at), powered(0, 999.0, 1000.0 + 250.0 * at))
    assert queue.energy(1) == EnergyUse(joules=1250.0, seconds=5.0, idle_s=5.0, peak_w=250.0)
    queue = Queue(running(1))
    for at, power in enumerate((100.0, 200.0, 300.0)):
        queue.note(float(at), powered(0, power, utilization_percent=90.0))
    energy = queue.energy(1)
    assert energy is not None
    assert (energy.joules, energy.integrated_s, energy.idle_s, energy.peak_w) == (400.0, 2.0, 0.0, 250.0)
    queue = Queue(running(1))
    queue.note(0.0, powered(0, None))
    queue.note(1.0, powered(0, None))
    assert queue.energy(1) is None
    assert queue.end(1, 1.5) is None


@pytest.mark.parametrize(
    ("since", "energies_j", "ended", "joules"),
    [
        pytest.param(0.0, [0.0, 200.0], 1.5, 300.0, id="after the last reading the power of that reading counts"),
        pytest.param(0.1, [0.0], 0.3, 40.0, id="a job that runs between two readings"),
    ],
)
def test_an_attempt_pays_until_its_end(since: float, energies_j: list[float], ended: float, joules: float) -> None:
    queue = Queue(running(1, since))
    for at, energy_j in enumerate(energies_j):
        queue.note(float(at), powered(0, 200.0, energy_j))
    energy = queue.end(1, ended)
    assert energy is not None
    assert energy.joules == pytest.approx(joules)


@pytest.mark.parametrize("following", [2, 1], ids=["another job", "a retry"])
def test_the_attempt_that_follows_is_not_charged_for_the_one_before(following: int) -> None:
    queue = Queue(running(1))
    queue.note(0.0, powered(0, 100.0, 0.0))
    queue.end(1, 0.5)
    queue.transitions.live[following] = running(following, 0.5)
    queue.note(1.0, powered(0, 100.0, 100.0))
    assert queue.joules(following) == pytest.approx(50.0)


def test_an_end_that_is_not_recorded_yet_ends_the_charge() -> None:
    queue = Queue(running(1))
    queue.note(0.0, powered(0, 100.0, 0.0))
    queue.note(2.0, powered(0, 100.0, 200.0), ended={1: 1.0})
    assert queue.joules(1) == pytest.approx(100.0)
    queue.meter.settle({1: 1.0})
    assert queue.joules(1) == pytest.approx(100.0)


def test_jobs_and_processes_that_share_a_card_pay_by_their_load() -> None:
    queue = Queue(running(1), running(2))
    queue.loads = {("L1", "G0"): 75.0, ("L2", "G0"): 25.0}
    queue.note(0.0, powered(0, 20.0, 0.0))  # its idle draw
    queue.note(1.0, powered(0, 220.0, 220.0))
    assert [queue.joules(1), queue.joules(2)] == pytest.approx([10.0 + 150.0, 10.0 + 50.0])
    queue = Queue(running(1))
    queue.loads = {("L1", "G0"): 50.0}
    busy = (Process(pid=1, utilization_percent=50.0), Process(pid=2, utilization_percent=50.0))
    queue.note(0.0, powered(0, 20.0, 0.0, processes=busy))
    queue.note(1.0, powered(0, 220.0, 220.0, processes=busy))
    assert queue.joules(1) == pytest.approx(20.0 + 100.0)


def test_a_job_on_two_cards_pays_for_both_and_jobs_on_parts_of_a_card_share_its_energy() -> None:
    queue = Queue(running(1, 0.0, "G0", "G1"))
    queue.note(0.0, powered(0, 100.0, 0.0), powered(1, 100.0, 500.0))
    queue.note(1.0, powered(0, 100.0, 100.0), powered(1, 100.0, 700.0))
    energy = queue.energy(1)
    assert energy is not None
    assert (energy.joules, energy.seconds, energy.peak_w) == (300.0, 2.0, 200.0)
    parts = [card(0, id="M0", parent="G0", power_draw_w=None), card(1, id="M1", parent="G0", power_draw_w=None)]
    queue = Queue(running(1, 0.0, "M0"), running(2, 0.0, "M1"))
    queue.note(0.0, powered(0, 100.0, 0.0), *parts)
    queue.note(1.0, powered(0, 100.0, 100.0), *parts)
    assert (queue.joules(1), queue.joules(2)) == (50.0, 50.0)


def test_a_suspended_job_pays_nothing() -> None:
    asleep = running(1)
    asleep = Live(job=replace(asleep.job, state=JobState.SUSPENDED), attempt=asleep.attempt)
    queue = Queue(asleep, running(2))
    queue.note(0.0, powered(0, 100.0, 0.0))
    queue.note(1.0, powered(0, 100.0, 100.0))
    assert queue.energy(1) is None
    assert queue.joules(2) == 100.0


def test_a_reading_of_memory_alone_and_one_that_follows_at_once_change_nothing() -> None:
    queue = Queue(running(1))
    queue.note(0.0, powered(0, 100.0, 0.0))
    reread = replace(sample(0.5, powered(0, None)), reread=frozenset({"G0"}))
    queue.meter.note(reread, {}, {})
    queue.note(0.01, powered(0, 100.0, 90.0))
    assert queue.energy(1) is None
    queue.note(1.0, powered(0, 100.0, 100.0))
    assert queue.joules(1) == 100.0


steps = st.lists(st.tuples(st.floats(0.3, 3.0), st.floats(10.0, 700.0), st.sets(st.integers(1, 4))), min_size=1)


@given(steps)
def test_attempts_together_get_what_the_card_used_while_held(steps: list[tuple[float, float, set[int]]]) -> None:
    """Attempts come and go with the readings, so nothing is estimated at the ends."""
    queue = Queue()
    at = energy_j = held_j = 0.0
    queue.note(at, powered(0, 10.0, energy_j))
    for seconds, power_w, jobs in steps:
        for job_id in jobs - set(queue.transitions.live):
            queue.transitions.live[job_id] = running(job_id, at)
        for job_id in set(queue.transitions.live) - jobs:
            queue.end(job_id, at)
        at, energy_j = at + seconds, energy_j + seconds * power_w
        held_j += seconds * power_w if jobs else 0.0
        queue.note(at, powered(0, power_w, energy_j))
    assert queue.meter.total.joules == pytest.approx(held_j, rel=1e-6)


def test_only_an_attempt_that_had_begun_gets_energy_of_a_reading() -> None:
    queue = Queue(running(1), running(2, since=1.2))
    queue.note(0.0, powered(0, 100.0, 0.0))
    queue.note(1.0, powered(0, 100.0, 100.0), ended={2: 1.3})
    assert (queue.joules(1), queue.energy(2)) == (100.0, None)
    queue = Queue(running(1))
    queue.note(0.0, powered(0, 100.0, 0.0))
    queue.note(1.0, powered(0, 100.0, 100.0), ended={1: 1.5})
    assert queue.end(1, 1.5) == EnergyUse(joules=150.0, seconds=1.5, idle_s=1.5, peak_w=100.0)
