"""Attempts as a report reads them, from a queue in memory."""

import sqlite3
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.model.job import Attempt, HandedOver, MemoryLack, Outcome, OutcomeKind, Over, Started, Usage
from gpuyard.model.job_spec import Task
from gpuyard.model.lease import FixedMemory, MemoryNeed, Need, UnknownMemory, WholeDevice
from gpuyard.model.lifecycle import JobState
from gpuyard.model.out_of_memory import Shortage, ShortageKind
from gpuyard.report.usage_report import GroupBy, PastAttempt
from gpuyard.store.past_attempts import attempts_since
from tests.unit.store import QueueDb, attempt_of, full_scans


def connection(queue_db: QueueDb) -> sqlite3.Connection:
    return queue_db.db.connection


def found(queue_db: QueueDb, since: float = 0.0, by: GroupBy = GroupBy.USER) -> list[PastAttempt]:
    return list(attempts_since(connection(queue_db), since, by))


def only(queue_db: QueueDb, by: GroupBy = GroupBy.USER) -> PastAttempt:
    (one,) = found(queue_db, by=by)
    return one


def begin(queue_db: QueueDb, job_id: int, **fields: Any) -> Attempt:
    attempt = attempt_of(job_id, **{"devices": ("G0", "G1"), **fields})
    queue_db.store.start_attempt(attempt)
    return attempt


def end(
    queue_db: QueueDb,
    attempt: Attempt,
    at: float,
    kind: OutcomeKind = OutcomeKind.SUCCEEDED,
    lack: MemoryLack | None = None,
) -> None:
    over = Over(before=attempt.last_live_phase, at=at, outcome=Outcome(kind=kind, status=3), lack=lack)
    queue_db.store.set_phase(replace(attempt, phase=over))


def test_attempts_that_ended_later_and_live_attempts_are_read(queue_db: QueueDb) -> None:
    early, late, live = queue_db.add(3)
    end(queue_db, begin(queue_db, early), 200.0)
    end(queue_db, begin(queue_db, late), 300.0)
    begin(queue_db, live)
    assert [each.job for each in found(queue_db, since=250.0)] == [late, live]
    assert [each.ended_at for each in found(queue_db, since=250.0)] == [300.0, None]


def test_all_fields_of_an_attempt_are_read(queue_db: QueueDb) -> None:
    (job,) = queue_db.add(need=Need(memory=FixedMemory(900.0)))
    usage = Usage(peaks_mb={"G0": 700.0, "G1": 800.0}, curve=((0.0, 1.0), (1.0, 2.0)))
    lack = MemoryLack(shortage=Shortage(where=ShortageKind.HOST, says="no more"))
    attempt = begin(queue_db, job, reserved_mb=900.0, usage=usage)
    end(queue_db, attempt, 200.0, OutcomeKind.OUT_OF_MEMORY, lack)
    queue_db.finish(job, 300.0)
    assert only(queue_db) == PastAttempt(
        job=job, group="me", started_at=110.0, ended_at=200.0, queued_at=100.0, devices=("G0", "G1"), gpus=2,
        reserved_mb=900.0, peaks_mb=usage.peaks_mb, outcome="out-of-memory", status=3, lacked="host", is_healed=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["a}b", 'quo"te', "plain"])
def test_peaks_are_read_for_any_device_name(queue_db: QueueDb, name: str) -> None:
    begin(queue_db, queue_db.add()[0], usage=Usage(peaks_mb={name: 5.0, "other": 6.0}, curve=((0.0, 1.0),)))
    assert only(queue_db).peaks_mb == {name: 5.0, "other": 6.0}


@pytest.mark.parametrize(
    ("memory", "reserved_mb", "is_alone"),
    [
        (WholeDevice(500.0), 500.0, True),
        (UnknownMemory(), 500.0, False),
        (UnknownMemory(), None, True),
        (FixedMemory(500.0), 500.0, False),
    ],
)
def test_whole_devices_are_marked(
    queue_db: QueueDb, memory: MemoryNeed, reserved_mb: float | None, is_alone: bool
) -> None:
    begin(queue_db, queue_db.add(need=Need(memory=memory))[0], reserved_mb=reserved_mb)
    assert only(queue_db).is_alone is is_alone


def test_the_wait_of_a_requeued_job_is_the_wait_before_its_first_start(queue_db: QueueDb) -> None:
    (job,) = queue_db.add()
    queue_db.store.add_event(job, 105.0, JobState.QUEUED)  # it was held before
    end(queue_db, begin(queue_db, job), 120.0, OutcomeKind.FAILED)
    queue_db.store.add_event(job, 120.0, JobState.QUEUED)
    queue_db.store.change_state(job, JobState.QUEUED, queued_at=120.0)
    begin(queue_db, job, number=2, phase=Started(at=130.0))
    assert [each.queued_at for each in found(queue_db)] == [105.0, None]


def test_suspended_times_are_those_of_the_attempt(queue_db: QueueDb) -> None:
    (job,) = queue_db.add()
    for at, kind in ((50.0, "suspending"), (60.0, "resumed"), (120.0, "suspending"), (121.0, "suspended"),
                     (130.0, "resumed"), (140.0, "suspending")):  # fmt: skip
        queue_db.store.add_event(job, at, kind)
    begin(queue_db, job, suspended_s=10.0, suspended_at=140.0)
    assert only(queue_db).suspended == ((120.0, 130.0), (140.0, None))


def test_an_attempt_at_an_engine_has_as_many_gpus_as_its_job_needs(queue_db: QueueDb) -> None:
    (job,) = queue_db.add(need=Need(devices=4), engine="slurm")
    begin(queue_db, job, engine="slurm", devices=(), phase=Started(at=110.0, place="node7"))
    assert (only(queue_db).gpus, only(queue_db).devices, only(queue_db).started_at) == (4, (), 110.0)


def test_an_attempt_that_its_engine_has_not_started_is_marked(queue_db: QueueDb) -> None:
    begin(queue_db, queue_db.add(engine="slurm")[0], engine="slurm", devices=(), phase=HandedOver(at=110.0))
    assert (only(queue_db).started_at, only(queue_db).queued_at) == (None, None)


def test_groups_are_workspaces_tags_names_or_a_dash(queue_db: QueueDb) -> None:
    task = Task(workspace="/data/zoo", config="cnn", owner="zoo-1/a", marker="/m", record="/r")
    for fields in ({"tag": "zoo-1", "task": task}, {"tag": "night", "name": "eval"}, {}):
        begin(queue_db, queue_db.add(**fields)[0])
    assert [each.group for each in found(queue_db, by=GroupBy.WORKSPACE)] == ["/data/zoo", "night", "-"]
    assert [each.group for each in found(queue_db, by=GroupBy.NAME)] == ["-", "eval", "-"]


def test_a_long_history_is_not_read_for_a_short_time(queue_db: QueueDb) -> None:
    for job in queue_db.add(3):
        begin(queue_db, job)
    plan = queue_db.plan_of(lambda: found(queue_db, since=500.0))
    assert [step for step in full_scans(plan) if "TEMP B-TREE" not in step] == []
