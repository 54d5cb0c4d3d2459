"""Attempts as a report reads them, from a queue in memory."""

import sqlite3
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.core.job.job import Attempt, MemoryLack, Outcome, OutcomeKind, Usage
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.workspace_task import Task
from gpuyard.core.lease import FixedMemory, MemoryNeed, Need, UnknownMemory, WholeDevice
from gpuyard.core.memory.out_of_memory import Shortage, ShortageKind
from gpuyard.core.report.usage_report import GroupBy, PastAttempt
from gpuyard.store.report_queries import attempts_since
from tests.unit.store import Shelf, full_scans


def connection(shelf: Shelf) -> sqlite3.Connection:
    return shelf.db._connection


def found(shelf: Shelf, since: float = 0.0, by: GroupBy = GroupBy.USER) -> list[PastAttempt]:
    return list(attempts_since(connection(shelf), since, by))


def only(shelf: Shelf, by: GroupBy = GroupBy.USER) -> PastAttempt:
    (one,) = found(shelf, by=by)
    return one


def begin(shelf: Shelf, job_id: int, **said: Any) -> Attempt:
    attempt = Attempt(job_id=job_id, number=1, pid=9, boot_id="b", started_at=110.0, devices=("G0", "G1"))
    attempt = replace(attempt, **said)
    shelf.store.start_attempt(attempt)
    return attempt


def end(shelf: Shelf, attempt: Attempt, at: float, kind: OutcomeKind = OutcomeKind.SUCCEEDED) -> None:
    shelf.store.end_attempt(attempt.job_id, attempt.number, Outcome(kind=kind, status=3), at)


def test_those_that_ended_after_that_time_are_read_and_those_that_go_on(shelf: Shelf) -> None:
    early, late, live = shelf.add(3)
    end(shelf, begin(shelf, early), 200.0)
    end(shelf, begin(shelf, late), 300.0)
    begin(shelf, live)
    assert [each.job for each in found(shelf, since=250.0)] == [late, live]
    assert [each.ended_at for each in found(shelf, since=250.0)] == [300.0, None]


def test_all_about_an_attempt_is_read(shelf: Shelf) -> None:
    (job,) = shelf.add(need=Need(memory=FixedMemory(900.0)))
    usage = Usage(peaks_mb={"G0": 700.0, "G1": 800.0}, curve=((0.0, 1.0), (1.0, 2.0)))
    lack = MemoryLack(shortage=Shortage(where=ShortageKind.HOST, says="no more"))
    attempt = begin(shelf, job, reserved_mb=900.0, usage=usage, lack=lack)
    end(shelf, attempt, 200.0, OutcomeKind.OUT_OF_MEMORY)
    shelf.finish(job, 300.0)
    assert only(shelf) == PastAttempt(
        job=job, group="me", started_at=110.0, ended_at=200.0, queued_at=100.0, devices=("G0", "G1"), gpus=2,
        reserved_mb=900.0, peaks_mb=usage.peaks_mb, outcome="out-of-memory", status=3, lacked="host", is_healed=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["a}b", 'quo"te', "plain"])
def test_peaks_are_read_whatever_a_device_is_called(shelf: Shelf, name: str) -> None:
    begin(shelf, shelf.add()[0], usage=Usage(peaks_mb={name: 5.0, "other": 6.0}, curve=((0.0, 1.0),)))
    assert only(shelf).peaks_mb == {name: 5.0, "other": 6.0}


@pytest.mark.parametrize(
    ("memory", "reserved_mb", "is_alone"),
    [
        (WholeDevice(500.0), 500.0, True),
        (UnknownMemory(), 500.0, False),
        (UnknownMemory(), None, True),
        (FixedMemory(500.0), 500.0, False),
    ],
)
def test_one_that_had_its_devices_alone_is_told_from_one_that_shared_them(
    shelf: Shelf, memory: MemoryNeed, reserved_mb: float | None, is_alone: bool
) -> None:
    begin(shelf, shelf.add(need=Need(memory=memory))[0], reserved_mb=reserved_mb)
    assert only(shelf).is_alone is is_alone


def test_the_wait_of_one_that_was_queued_again_is_that_before_its_first_start(shelf: Shelf) -> None:
    (job,) = shelf.add()
    shelf.store.add_event(job, 105.0, JobState.QUEUED)  # it was held before
    end(shelf, begin(shelf, job), 120.0, OutcomeKind.FAILED)
    shelf.store.add_event(job, 120.0, JobState.QUEUED)
    shelf.store.change_state(job, JobState.QUEUED, queued_at=120.0)
    begin(shelf, job, number=2, started_at=130.0)
    assert [each.queued_at for each in found(shelf)] == [105.0, None]


def test_suspended_stretches_are_those_of_the_very_attempt(shelf: Shelf) -> None:
    (job,) = shelf.add()
    for at, kind in ((50.0, "suspending"), (60.0, "resumed"), (120.0, "suspending"), (121.0, "suspended"),
                     (130.0, "resumed"), (140.0, "suspending")):  # fmt: skip
        shelf.store.add_event(job, at, kind)
    begin(shelf, job, suspended_s=10.0, suspended_at=140.0)
    assert only(shelf).suspended == ((120.0, 130.0), (140.0, None))


def test_an_attempt_at_an_engine_has_as_many_gpus_as_its_job_needs(shelf: Shelf) -> None:
    (job,) = shelf.add(need=Need(devices=4), engine="slurm")
    begin(shelf, job, engine="slurm", devices=(), place="node7")
    assert (only(shelf).gpus, only(shelf).devices, only(shelf).has_started) == (4, (), True)


def test_one_that_its_engine_has_not_begun_is_told_so(shelf: Shelf) -> None:
    begin(shelf, shelf.add(engine="slurm")[0], engine="slurm", devices=())
    assert not only(shelf).has_started


def test_groups_are_workspaces_tags_or_names_and_else_a_dash(shelf: Shelf) -> None:
    task = Task(workspace="/data/zoo", config="cnn", owner="zoo-1/a", marker="/m", record="/r")
    for said in ({"tag": "zoo-1", "task": task}, {"tag": "night", "name": "eval"}, {}):
        begin(shelf, shelf.add(**said)[0])
    assert [each.group for each in found(shelf, by=GroupBy.WORKSPACE)] == ["/data/zoo", "night", "-"]
    assert [each.group for each in found(shelf, by=GroupBy.NAME)] == ["-", "eval", "-"]


def test_a_long_history_is_not_read_for_a_short_time(shelf: Shelf) -> None:
    for job in shelf.add(3):
        begin(shelf, job)
    plan = shelf.plan_of(lambda: found(shelf, since=500.0))
    assert [step for step in full_scans(plan) if "TEMP B-TREE" not in step] == []
