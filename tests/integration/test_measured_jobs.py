"""Measured device memory of jobs: real processes, attributed to leases by the real ledger."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from gpuyard.ledger.ledger import QueueLedger, open_ledger
from gpuyard.ledger.measured_usage import LEASE_VARIABLE
from gpuyard.model.job import Attempt, Job, Outcome, OutcomeKind, Started
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import Need, UnknownMemory
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Host, Process, Sample, Snapshot, Vendor
from gpuyard.model.placeholders import ArrayElement
from gpuyard.policy.queue_order import Lane
from gpuyard.queue.measure_usage import UsageTracker
from gpuyard.queue.transitions import JobTransitions
from gpuyard.store.database import open_database
from gpuyard.store.job_store import JobStore
from gpuyard.system.processes import this_process


@contextmanager
def program(lease_id: str | None) -> Iterator[int]:
    environment = {name: value for name, value in os.environ.items() if name != LEASE_VARIABLE}
    marked = environment if lease_id is None else {**environment, LEASE_VARIABLE: lease_id}
    process = subprocess.Popen(["sleep", "600"], env=marked)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@contextmanager
def transitions_with_leases(*lease_ids: str) -> Iterator[JobTransitions]:
    database, _ = open_database(None)
    store = JobStore(database)
    spec = JobSpec(command=("train",), cwd="/", environment={}, need=Need(memory=UnknownMemory()))
    like = Job(id=1, spec=spec, state=JobState.QUEUED, priority=0, user="me", submitted_at=0.0)
    lane = Lane(id=0, priority=0, user="me", tag="", need=Need())
    with store.transaction():
        store.add_jobs(like, store.add_spec(spec), store.ensure_lane(lane), 1, [ArrayElement()] * len(lease_ids))
        for number, lease_id in enumerate(lease_ids, 1):
            store.start_attempt(
                Attempt(
                    job_id=number,
                    number=1,
                    phase=Started(at=0.0, keeper_pid=1),
                    boot_id=None,
                    lease_id=lease_id,
                    devices=("G0",),
                    reserved_mb=1024.0,
                )
            )
    transitions = JobTransitions(store)
    transitions.reload()
    with closing(database):
        yield transitions


@pytest.mark.parametrize("foreign_mb", [0.0, 10_000.0], ids=["idle", "a container's program"])
def test_work_outside_of_a_job_keeps_it_from_being_learned_to_need_nothing(foreign_mb: float) -> None:
    """As of `bash train.sh` with a `docker run` in it: the program is no process of the job."""
    me = this_process("gpuyard queue")
    with transitions_with_leases("one") as transitions, program(None) as container:
        observer = UsageTracker(transitions, QueueLedger(open_ledger(), me), me)
        for now, used_mb in enumerate([0.0, 0.0, 0.0, 0.0, foreign_mb, 0.0, 0.0], 1):
            processes = (Process(pid=container, memory_mb=used_mb),) if used_mb else ()
            device = Device(
                id="G0", vendor=Vendor.NVIDIA, memory_total_mb=24_000.0, memory_used_mb=used_mb, processes=processes
            )
            snapshot = Snapshot(taken_at=float(now), host=Host(), devices=(device,))
            observer.note(Sample(snapshot=snapshot), now=float(now))
        job = transitions.live[1].job
        with transitions.in_step():
            transitions.end(1, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), 8.0)
        assert transitions.estimates.predicted_mb(job) == (None if foreign_mb else 256.0)


def test_a_process_whose_environment_names_no_lease_counts_for_no_job() -> None:
    """An ending process: it still has memory, its environment is gone, and the daemon is its ancestor."""
    me = this_process("gpuyard queue")
    with (
        transitions_with_leases("one", "two") as transitions,
        program("one") as first,
        program("two") as second,
        program(None) as ending,
    ):
        observer = UsageTracker(transitions, QueueLedger(open_ledger(), me), me)
        held = {first: 1000.0, second: 2000.0, ending: 40_000.0}
        device = Device(
            id="G0", vendor=Vendor.NVIDIA, memory_total_mb=80_000.0, memory_used_mb=43_000.0, memory_free_mb=37_000.0,
            processes=tuple(Process(pid=pid, memory_mb=mb) for pid, mb in held.items()),
        )  # fmt: skip
        observer.note(Sample(snapshot=Snapshot(taken_at=0.0, host=Host(), devices=(device,))), now=5.0)
    used = {job_id: live.attempt.usage.peaks_mb for job_id, live in transitions.live.items() if live.attempt.usage}
    assert used == {1: {"G0": 1000.0}, 2: {"G0": 2000.0}}
