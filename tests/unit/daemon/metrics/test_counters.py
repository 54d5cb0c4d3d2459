"""The counters of `/metrics`."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.daemon.metrics import EventCounters, Histogram
from gpuyard.model.job import (
    Attempt,
    HandedOver,
    Job,
    MemoryLack,
    Outcome,
    OutcomeKind,
    Over,
    PublishedEvent,
    PublishedEventKind,
    Started,
)
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Host, Snapshot
from gpuyard.model.out_of_memory import Shortage, ShortageKind
from gpuyard.policy.plan import decide
from gpuyard.policy.world import Plan
from gpuyard.queue.step import Step
from tests.unit.daemon.metrics.test_prometheus_text import series_of_counters
from tests.unit.policy.test_placement import GB, card, lease, machine, shared
from tests.unit.policy.test_planner import queue, view

SPEC = JobSpec(command=("true",), cwd="/", environment={}, need=Need())
JOB = Job(id=1, spec=SPEC, state=JobState.RUNNING, priority=0, user="me", submitted_at=100.0)
ATTEMPT = Attempt(job_id=1, number=1, phase=Started(at=200.0, keeper_pid=9), boot_id="b")
EMPTY = Snapshot(taken_at=0.0, host=Host())


def step(*events: PublishedEvent) -> Step:
    return Step(wake_at=None, waits_for_devices=False, waits_for_sample=False, started=0, events=events)


def count_events(*events: PublishedEvent) -> EventCounters:
    counters = EventCounters()
    counters.count(step(*events), 0.001, Plan(), EMPTY)
    return counters


def started(job: Job = JOB, at: float = 200.0) -> PublishedEvent:
    return PublishedEvent(kind=PublishedEventKind.STARTED, job=job, attempt=ATTEMPT, at=at)


def ended(
    kind: OutcomeKind,
    before: HandedOver | Started = Started(at=200.0, keeper_pid=9),  # noqa: B008 - a frozen value
    lack: MemoryLack | None = None,
    **attempt: Any,
) -> PublishedEvent:
    over = Over(before=before, at=260.0, outcome=Outcome(kind=kind), lack=lack)
    over_attempt = replace(ATTEMPT, phase=over, **attempt)
    return PublishedEvent(kind=PublishedEventKind.ENDED, job=JOB, attempt=over_attempt, at=over.at)


def finished(state: JobState, job_id: int = 1) -> PublishedEvent:
    return PublishedEvent(kind=PublishedEventKind.FINISHED, job=replace(JOB, id=job_id, state=state), at=300.0)


def lack(where: ShortageKind) -> MemoryLack:
    return MemoryLack(shortage=Shortage(where=where, says="out of memory"))


def test_starts_are_counted_and_ends_by_outcome() -> None:
    series = series_of_counters(
        count_events(
            started(),
            started(),
            ended(OutcomeKind.FAILED),
            ended(OutcomeKind.SUCCEEDED),
            finished(JobState.SUCCEEDED),
            finished(JobState.CANCELLED),
        )
    )
    assert series["gpuyard_starts_total", ""] == 2
    outcomes = {word: count for (name, word), count in series.items() if name == "gpuyard_attempts_ended_total"}
    assert {word for word, count in outcomes.items() if count} == {"failed", "succeeded"}
    assert {"timed-out", "out-of-memory", "lost"} <= outcomes.keys()
    assert series["gpuyard_jobs_finished_total", "succeeded"] == series["gpuyard_jobs_finished_total", "cancelled"] == 1
    assert series["gpuyard_jobs_finished_total", "failed"] == 0


def test_out_of_memory_is_counted_by_device_and_host_and_run_time_without_suspension() -> None:
    host, device = (
        ended(OutcomeKind.OUT_OF_MEMORY, lack=lack(where)) for where in (ShortageKind.HOST, ShortageKind.DEVICE)
    )
    series = series_of_counters(count_events(host, device, device, ended(OutcomeKind.FAILED)))
    assert [series["gpuyard_out_of_memory_total", where] for where in ("device", "host")] == [2, 1]
    assert series["gpuyard_attempts_ended_total", "out-of-memory"] == 3
    suspended = ended(OutcomeKind.SUCCEEDED, suspended_s=20.0)
    series = series_of_counters(count_events(suspended, ended(OutcomeKind.CANCELLED, HandedOver(at=200.0))))
    assert (series["gpuyard_run_seconds_sum", ""], series["gpuyard_run_seconds_count", ""]) == (40.0, 1)
    assert series["gpuyard_attempts_ended_total", "cancelled"] == 1


def test_a_wait_starts_when_the_job_was_last_queued_and_is_never_negative() -> None:
    counters = count_events(started(at=102.0), started(replace(JOB, queued_at=195.0), at=200.0))
    assert counters.wait_s.total == 2.0 + 5.0
    assert series_of_counters(counters)["gpuyard_wait_seconds_bucket", "3"] == 1
    assert count_events(started(at=50.0)).wait_s.total == 0.0


@pytest.mark.parametrize(("value", "bound"), [(0.5, "1"), (1.0, "1"), (1.5, "2"), (2.5, "+Inf")])
def test_a_bucket_includes_its_bound(value: float, bound: str) -> None:
    histogram = Histogram([1.0, 2.0])
    histogram.add(value)
    assert dict(zip(["1", "2", "+Inf"], histogram.counts, strict=True))[bound] == 1


def test_buckets_are_cumulative() -> None:
    counters = EventCounters()
    for took in (5e-6, 3e-5, 0.003, 7.0):
        counters.count(step(), took, Plan(), EMPTY)
    series = series_of_counters(counters)
    bounds = ("1e-05", "5e-05", "0.005", "1", "+Inf")
    assert [series["gpuyard_step_seconds_bucket", bound] for bound in bounds] == [1, 2, 3, 3, 4]
    assert series["gpuyard_step_seconds_count", ""] == 4
    assert series["gpuyard_step_seconds_sum", ""] == pytest.approx(7.003035)


def test_a_job_kept_from_running_out_of_memory_counts_once() -> None:
    on, reserved = machine(card(0)), [lease("a", "G0", memory_mb=16 * GB)]

    def plan(*waiting: int) -> Plan:
        lanes = (queue(job_id, shared((10 + job_id) * GB)) for job_id in waiting)
        return decide(view(*lanes, on=on, leases=reserved))

    counters = EventCounters()
    for snapshot in (on, on, replace(on, taken_at=1.0)):
        counters.count(step(), 0.001, plan(1), snapshot)
    assert series_of_counters(counters)["gpuyard_out_of_memory_avoided_total", ""] == 1
    counters.count(step(), 0.001, plan(1, 2), replace(on, taken_at=2.0))
    assert series_of_counters(counters)["gpuyard_out_of_memory_avoided_total", ""] == 2
    counters.count(step(finished(JobState.CANCELLED)), 0.001, Plan(), on)
    counters.count(step(), 0.001, plan(1), replace(on, taken_at=3.0))
    assert series_of_counters(counters)["gpuyard_out_of_memory_avoided_total", ""] == 3  # after the user ran it again


def test_a_waiting_job_is_examined_again_with_the_next_snapshot() -> None:
    reserved, full = [lease("a", "G0", memory_mb=16 * GB)], machine(card(0, used=16 * GB))
    plan = decide(view(queue(1, shared(12 * GB)), on=full, leases=reserved))
    counters = EventCounters()
    counters.count(step(), 0.001, plan, full)
    assert counters.out_of_memory_avoided == 0
    counters.count(step(), 0.001, plan, machine(card(0, used=2 * GB)))
    assert counters.out_of_memory_avoided == 1
