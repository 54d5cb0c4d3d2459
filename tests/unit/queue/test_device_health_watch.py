"""Whether a failed program failed because of its GPU, and when that is known."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.model.job import Attempt, Job, Outcome, OutcomeKind, Started
from gpuyard.model.job_spec import JobSpec, RetryCause
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import JobEvent, JobState
from gpuyard.model.machine_snapshot import HealthFigures, HealthMark, Host, IssueKind, Sample, Snapshot, XidEvent
from gpuyard.model.retry import after_device_fault
from gpuyard.ports import Ended
from gpuyard.queue.attempt_ends import DeviceHealthWatch
from gpuyard.queue.live_attempts import Live
from tests.unit.policy.test_placement import card

FAILED = Outcome(kind=OutcomeKind.FAILED, status=1, reason="exit status 1")
ATTEMPT = Attempt(job_id=1, number=1, phase=Started(at=90.0), devices=("G0",))
XID = HealthFigures(xids=(XidEvent(code=79, at=99.0),))


class Marks:
    def __init__(self, *marks: HealthMark) -> None:
        self.marks = marks

    def health_marks(self) -> tuple[HealthMark, ...]:
        return self.marks


def watch(*marks: HealthMark) -> DeviceHealthWatch:
    return DeviceHealthWatch(Marks(*marks))  # type: ignore[arg-type]


def job(**options: Any) -> Job:
    spec = JobSpec(command=("true",), cwd="/", environment={}, need=Need(), **options)
    return Job(id=1, spec=spec, state=JobState.RUNNING, priority=0, user="me", submitted_at=0.0)


def sample(taken_at: float | None, health: HealthFigures | None = None) -> Sample:
    return Sample(snapshot=Snapshot(taken_at=taken_at, host=Host(), devices=(card(0, health=health),)))


def ended(at: float | None = 100.0, outcome: Outcome = FAILED) -> Ended:
    return Ended(job_id=1, attempt=1, outcome=outcome, at=at)


def test_the_fault_of_its_own_card_counts() -> None:
    mark = HealthMark(device_id="G0", since=99.0, kind=IssueKind.XID, xid=48)
    assert "Xid 79" in (watch().fault_of(ATTEMPT, sample(101.0, XID)) or "")
    assert "Xid 48" in (watch(mark).fault_of(ATTEMPT, sample(101.0)) or "")
    assert watch().fault_of(ATTEMPT, sample(101.0, HealthFigures())) is None
    assert watch().fault_of(replace(ATTEMPT, devices=("G1",)), sample(101.0, XID)) is None


@pytest.mark.parametrize(
    ("sample", "ended", "now", "waits"),
    [
        (sample(99.0, HealthFigures()), ended(), 100.1, True),
        (sample(100.5, HealthFigures()), ended(), 100.6, False),
        (sample(99.0, HealthFigures()), ended(), 102.1, False),
        (sample(99.0, HealthFigures()), ended(at=None), 100.1, False),
        (sample(99.0, XID), ended(), 100.1, False),
        (sample(99.0), ended(), 100.1, False),
        (sample(99.0, HealthFigures()), ended(outcome=Outcome(kind=OutcomeKind.SUCCEEDED)), 100.1, False),
    ],
    ids=["too old", "new enough", "waited long enough", "no time", "faulty already", "no figures", "it succeeded"],
)
def test_a_failure_waits_for_a_sample_with_the_fault(sample: Sample, ended: Ended, now: float, waits: bool) -> None:
    live = Live(job=job(), attempt=ATTEMPT)
    assert watch().needs_newer_sample(live, ended, sample, now) is waits


def test_up_to_three_faults_use_up_no_retry_if_the_job_is_retried_after_them() -> None:
    for before in range(3):
        outcome, verdict = after_device_fault(job(), FAILED, before)
        assert (outcome.kind, outcome.status) == (OutcomeKind.DEVICE_FAULT, 1)
        assert (verdict.event, verdict.counts) == (JobEvent.REQUEUE, False)
    outcome, verdict = after_device_fault(job(), FAILED, 3)
    assert (outcome.kind, verdict.event, verdict.counts) == (OutcomeKind.FAILED, JobEvent.FAIL, True)
    _, verdict = after_device_fault(job(retries=1), FAILED, 3)
    assert (verdict.event, verdict.counts) == (JobEvent.RETRY, True)
    _, verdict = after_device_fault(job(retries=1, retry_on=(RetryCause.OOM,)), FAILED, 0)
    assert (verdict.event, verdict.counts) == (JobEvent.FAIL, True)
