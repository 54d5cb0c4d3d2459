"""The load of a job that shares a card: that of its processes, or derived from the load of the card."""

from typing import Any, cast

import pytest
from msgspec.structs import replace

from gpuyard.model.job import Usage
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Sample
from gpuyard.ports import LeaseLedger
from gpuyard.queue.live_attempts import Live, LiveJobs
from gpuyard.queue.measure_usage import UsageTracker
from gpuyard.queue.transitions import JobTransitions
from gpuyard.system.processes import this_process
from tests.unit.policy.test_placement import GB, card, machine
from tests.unit.policy.test_sizing import attempt, job


class NoEstimates:
    def load_percent(self, _: object) -> None:
        return None


class Transitions:
    def __init__(self, *lives: Live) -> None:
        self.live = LiveJobs(lives)
        self.estimates = NoEstimates()

    def note_usage(self, job_id: int, usage: Usage) -> None:
        live = self.live[job_id]
        self.live[job_id] = Live(job=live.job, attempt=replace(live.attempt, usage=usage))


class Ledger:
    """Each lease holds 2 GB of G0, and keeps it as busy as `loads` says."""

    def __init__(self, loads: dict[str, float]) -> None:
        self.loads = loads

    def measure(self, _: object, leases: tuple[Any, ...]) -> dict[tuple[str, str], float | None]:
        return {(lease.id, "G0"): 2 * GB for lease in leases}

    def measure_loads(self, *_: object) -> dict[tuple[str, str], float | None]:
        return {(lease_id, "G0"): load for lease_id, load in self.loads.items()}


def running(job_id: int, lease_id: str) -> Live:
    return Live(
        job=replace(job(), id=job_id, state=JobState.RUNNING),
        attempt=replace(attempt(), job_id=job_id, lease_id=lease_id),
    )


@pytest.mark.parametrize(
    ("by_process", "loads"),
    [
        pytest.param({"a": 10.0, "b": 85.0}, (10.0, 85.0), id="the driver says how busy each process keeps it"),
        pytest.param({}, (50.0, 50.0), id="the driver says only how busy the card is"),
    ],
)
def test_the_load_of_jobs_that_share_a_card(by_process: dict[str, float], loads: tuple[float, float]) -> None:
    transitions = Transitions(running(1, "a"), running(2, "b"))
    tracker = UsageTracker(cast("JobTransitions", transitions), cast("LeaseLedger", Ledger(by_process)), this_process())
    for now in (10.0, 11.0):
        busy = card(0, used=4 * GB, utilization_percent=75.0)
        tracker.note(Sample(snapshot=machine(busy)), now)
    found = [live.attempt.usage.load_percent if live.attempt.usage else None for live in transitions.live.values()]
    assert found == pytest.approx(list(loads))
