"""How many jobs share a GPU follows from how much they slow each other; the real controller on a simulated machine."""

import contextlib
from collections.abc import Iterator, Sequence

from gpuyard.simulated_usage import parse_devices
from gpuyard.simulator.policies import find_policy
from gpuyard.simulator.schedule_metrics import SimulatedPass
from gpuyard.simulator.sharing_slowdown import Member, Sharing
from gpuyard.simulator.simulation import Simulation
from gpuyard.simulator.trace_file import TraceJob
from tests.unit.simulator.samples import trace_job

DAY = 86_400.0


class EvenSlowdown(Sharing):
    """Beside each other job on its device, a job takes `more` times its duration longer."""

    def __init__(self, more: float) -> None:
        super().__init__()
        self.speeds = lambda members: self._even(members, more)

    def _even(self, members: tuple[Member, ...], more: float) -> tuple[float, ...]:
        return tuple(1.0 / (1.0 + more * (len(members) - 1)) for _ in members)


@contextlib.contextmanager
def simulation(sharing: Sharing, policy: str = "gpuyard", devices: str = "1x24GB") -> Iterator[Simulation]:
    found = Simulation(parse_devices(devices), sharing, find_policy(policy))
    try:
        yield found
    finally:
        found.close()


def passes(sharing: Sharing, jobs: Sequence[TraceJob], count: int, devices: str = "1x24GB") -> list[SimulatedPass]:
    with simulation(sharing, devices=devices) as found:
        return [found.play(jobs) for _ in range(count)]


def makespan(passed: SimulatedPass) -> float:
    return max(run.ended_s for run in passed.runs)


def most_at_once(passed: SimulatedPass) -> int:
    runs = passed.runs
    return max(sum(run.started_s <= start.started_s < run.ended_s for run in runs) for start in runs)


def test_programs_that_slow_each_other_more_than_they_gain_run_one_at_a_time() -> None:
    jobs = [trace_job(float(place), duration_s=100.0, peak_mb=2000.0, load_percent=90.0) for place in range(12)]
    first, second, third = passes(EvenSlowdown(1.5), jobs, 3)
    assert most_at_once(first) > 1
    assert most_at_once(third) == 1
    assert makespan(third) <= 1.02 * 1200.0, "slower than one at a time"
    assert makespan(second) <= makespan(first)


def test_programs_that_hardly_slow_each_other_share_in_larger_numbers() -> None:
    jobs = [trace_job(float(place), duration_s=100.0, peak_mb=1000.0, load_percent=90.0) for place in range(20)]
    *_, harmless = passes(EvenSlowdown(0.05), jobs, 3)
    *_, harmful = passes(EvenSlowdown(0.5), jobs, 3)
    assert most_at_once(harmless) > 2 * most_at_once(harmful) > 2


def test_the_longest_job_does_not_end_later_because_short_ones_share_its_gpu() -> None:
    long = trace_job(0.0, program="python long.py", duration_s=3 * DAY, peak_mb=6000.0, load_percent=60.0)
    short = [
        trace_job(600.0 * place, program="python short.py", duration_s=1200.0, peak_mb=6000.0, load_percent=60.0)
        for place in range(1, 200)
    ]
    first, second = passes(Sharing(), [long, *short], 2, devices="2x24GB")
    assert makespan(first) <= 3.08 * DAY, "it was still shared once it had run for far longer than others"
    assert makespan(second) <= 3.01 * DAY
    assert len({run.devices for run in second.runs if run.job}) == 1
