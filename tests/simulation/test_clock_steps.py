"""The wall clock is set at random moments: every decision is the same as if it had not been set."""

from dataclasses import replace
from random import Random

import pytest

from tests.scale import seeds
from tests.simulation.scenario import WITHIN_S, Scenario, random_script

DAY_S = 86_400.0
AT_ONCE = 5


def steps(seed: int) -> tuple[tuple[float, float], ...]:
    random = Random(f"clock {seed}")
    sizes = (1.0, 60.0, 3600.0, DAY_S, 56 * 365 * DAY_S)
    return tuple(
        (random.uniform(0.0, WITHIN_S), random.choice((-1, 1)) * random.choice(sizes) * random.random())
        for _ in range(random.randint(1, 6))
    )


@pytest.mark.parametrize("first", range(0, seeds(10, full=100), AT_ONCE))
def test_steps_of_the_wall_clock_change_no_decision(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        stepped = steps(seed)
        script = replace(random_script(seed), clock_steps=stepped)
        unstepped = replace(script, clock_steps=tuple((at, 0.0) for at, _ in stepped))
        assert Scenario(script).run().log == Scenario(unstepped).run().log, f"seed {seed}"


def test_a_ticket_of_the_wall_clock_would_change_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above notices if the controller compares a wall time with its own."""
    monkeypatch.setattr("gpuyard.simulator.virtual_machine.VirtualClock.from_wall", lambda _, at: at)
    differing = []
    for seed in range(40):
        stepped = ((1.0, -DAY_S), (20.0, 2 * DAY_S))
        script = replace(random_script(seed), clock_steps=stepped)
        unstepped = replace(script, clock_steps=tuple((at, 0.0) for at, _ in stepped))
        if Scenario(script).run().log != Scenario(unstepped).run().log:
            differing.append(seed)
            break
    assert differing
