"""What the planner knows about jobs that share devices."""

from typing import cast

from msgspec.structs import replace

from gpuyard.control.live_jobs import Live
from gpuyard.control.sharing_facts import SharingFacts
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Usage
from tests.unit.control.test_track_usage import Transitions, running


def with_usage(job_id: int, lease_id: str, usage: Usage) -> Live:
    live = running(job_id, lease_id)
    return Live(job=live.job, attempt=replace(live.attempt, usage=usage))


def test_a_load_that_cannot_be_measured_stays_unknown() -> None:
    """Beside a job that never leaves the device idle, no load can be told: it does not count as the usual one."""
    lives = with_usage(1, "a", Usage(load_percent=80.0)), with_usage(2, "b", Usage(load_percent=None)), running(3, "c")
    facts = SharingFacts(cast("JobTransitions", Transitions(*lives)))
    assert list(facts.lease_loads(now=1e9)) == ["a"]
