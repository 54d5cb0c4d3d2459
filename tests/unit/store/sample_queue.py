"""A small queue with jobs in every state, and the helpers that fill it."""

from collections.abc import Sequence

from msgspec.structs import replace

from gpuyard.model.dependencies import Dependency, DependencyKind
from gpuyard.model.job import (
    Attempt,
    Growth,
    HandedOver,
    Job,
    MemoryLack,
    Outcome,
    OutcomeKind,
    Over,
    Started,
    SuspendedBy,
    Usage,
)
from gpuyard.model.job_spec import BatchPace, JobSpec, OnPreempt, OnReboot
from gpuyard.model.lease import FixedMemory, Need, UnknownMemory
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Vendor
from gpuyard.model.out_of_memory import Shortage, ShortageKind
from gpuyard.model.placeholders import ArrayElement
from gpuyard.policy.estimates import Profile
from gpuyard.policy.queue_order import WeightedUse
from gpuyard.store.job_store import JobStore
from gpuyard.store.row_codec import lane_of
from tests.unit.store import end_attempt

SPEC = JobSpec(command=("python", "train.py"), cwd="/data/me", environment={"LANG": "caf\udce9"}, need=Need())
FULL = JobSpec(
    command=("run", "{lr}"), cwd="/data/me", environment={},
    need=Need(devices=2, memory=FixedMemory(8192.0), vendor=Vendor.NVIDIA, model="H100", banned=("GPU-x",)),
    name="big", tag="night", retries=2, time_limit_s=3600.0, grace_s=5.0, duration_s=600.0,
    on_reboot=OnReboot.REQUEUE, stdin="in.txt", log_cap_mb=64.0, is_array=True,
)  # fmt: skip
LEARNING = replace(
    SPEC, need=replace(SPEC.need, memory=UnknownMemory()), configuration="c0ffee", preempts=True,
    on_preempt=OnPreempt.REQUEUE, name="learns",
)  # fmt: skip
ELSEWHERE = replace(SPEC, engine="slurm", engine_options=("--partition=big",), cpus=4)
PACED = replace(
    SPEC,
    command=("sim_view", "--seed", "{seed}"),
    need=Need(memory=FixedMemory(2048.0)),
    name="batch",
    is_array=True,
    pace=BatchPace(
        max_cpu_percent=85.0,
        min_free_memory_mb=2048.0,
        max_gpu_percent=80.0,
        max_gpu_memory_mb=8000.0,
        run_ram_mb=512.0,
        smoothing_s=4.0,
        steady_s=2.0,
        stagger_s=1.5,
        sample_log="/data/me/samples.csv",
    ),
)
SHORTAGE = Shortage(where=ShortageKind.DEVICE, says="CUDA out of memory", asked_mb=2048.0, held_mb=6144.0)
USAGE = Usage(
    peaks_mb={"GPU-a": 6144.0, "GPU-b": 512.0}, ram_mb=900.0, load_percent=55.0, load_s=3.0,
    curve=((0.5, 100.0), (9.0, 6144.0)), grew_at_s=9.0,
)  # fmt: skip
FAILED = Outcome(kind=OutcomeKind.FAILED, status=3, reason="exit status 3")
SUCCEEDED = Outcome(kind=OutcomeKind.SUCCEEDED, status=0)


def like(spec: JobSpec = SPEC, state: JobState = JobState.QUEUED) -> Job:
    return Job(id=0, spec=spec, state=state, priority=0, user="me", submitted_at=1000.0)


def submit(store: JobStore, job: Job, elements: Sequence[ArrayElement] = (ArrayElement(),), token: str = "") -> int:
    number, first = store.start_submission(token, len(elements))
    job = replace(job, id=first, group=first if job.spec.is_array else None)
    store.add_jobs(job, store.add_spec(job.spec), store.ensure_lane(lane_of(job)), first, elements)
    store.complete_submission(number)
    return first


def attempt(job_id: int, number: int = 1) -> Attempt:
    return Attempt(
        job_id=job_id, number=number, phase=Started(at=1010.0, keeper_pid=4000 + job_id), boot_id="boot-1",
        lease_id=f"lease-{job_id}", devices=("GPU-a", "GPU-b"), log=f"/logs/{job_id}.{number}", stop_at=4610.0,
    )  # fmt: skip


def fill(store: JobStore) -> None:
    """Add jobs 1 to 22, in every state."""
    with store.transaction():
        _add_plain(store)
        _add_suspended(store)
        _add_batch(store)
        _add_dispatched(store)


def _add_plain(store: JobStore) -> None:
    submit(store, like(), token="sent-once")  # 1, queued
    submit(store, replace(like(state=JobState.HELD), reason="submitted as held"))  # 2
    blocked = submit(store, like(state=JobState.BLOCKED))  # 3
    blocks = Dependency(job_id=1), Dependency(job_id=2, kind=DependencyKind.ANY)
    store.add_pairs((blocked, other) for other in blocks)
    delayed = submit(store, like())  # 4
    store.start_attempt(attempt(delayed))
    end_attempt(store, delayed, 1, FAILED, 1020.0)
    store.change_state(delayed, JobState.DELAYED, reason="again", due_at=1030.0, outcome=FAILED, failures=1)
    store.start_attempt(attempt(submit(store, like())))  # 5, running
    stopping = submit(store, like())  # 6
    store.start_attempt(attempt(stopping))
    store.update_attempt(replace(attempt(stopping), stopping=OutcomeKind.CANCELLED, kill_at=1050.0))
    store.change_state(stopping, JobState.STOPPING, reason="stopping: cancelled")
    succeeded = submit(store, like())  # 7
    store.start_attempt(attempt(succeeded))
    end_attempt(store, succeeded, 1, FAILED, 1020.0)
    store.start_attempt(attempt(succeeded, 2))
    end_attempt(store, succeeded, 2, SUCCEEDED, 1030.0)
    store.change_state(succeeded, JobState.SUCCEEDED, ended_at=1030.0, outcome=SUCCEEDED)
    store.add_event(succeeded, 1020.0, "delayed", "exit status 3; again at once")
    failed = submit(store, like())  # 8
    store.start_attempt(attempt(failed))
    end_attempt(store, failed, 1, FAILED, 1020.0)
    store.change_state(failed, JobState.FAILED, reason="exit status 3", ended_at=1020.0, outcome=FAILED, failures=1)
    store.add_event(failed, 1020.0, "failed", "exit status 3")
    cancelled = submit(store, like())  # 9
    store.change_state(cancelled, JobState.CANCELLED, reason="cancelled", ended_at=1040.0)
    rejected = submit(store, replace(like(state=JobState.REJECTED), reason="never satisfied", ended_at=1001.0))  # 10
    store.add_pairs([(rejected, Dependency(job_id=7, kind=DependencyKind.FAILED))])
    swept = [
        ArrayElement(values={"lr": "1e-3"}),
        ArrayElement(index=7),
        ArrayElement(command=("/bin/sh", "-c", "a | b")),
    ]
    submit(store, replace(like(FULL), priority=3, group_limit=2), swept)  # 11 to 13
    store.learned.set_recent_use(("me", "night"), WeightedUse(seconds=120.0, at=1030.0))
    store.learned.set_profile("0123", Profile(count=2, durations_s=(10.0, 20.0)))
    store.set_setting("paused", "1")


def _add_suspended(store: JobStore) -> None:
    """Add jobs that are being suspended and resumed, a job that ran out of memory, and its profile."""
    for state in (JobState.SUSPENDING, JobState.SUSPENDED, JobState.RESUMING):  # 14 to 16
        job_id = submit(store, like(LEARNING))
        started = replace(attempt(job_id), reserved_mb=8192.0, predicted_mb=7000.0)
        store.start_attempt(started)
        store.update_attempt(
            replace(started, parked=SuspendedBy.FOR_ROOM, suspended_at=1100.0, suspended_s=30.0, usage=USAGE)
        )
        store.change_state(job_id, state, reason="preempted by job 17")
    short = submit(store, like(LEARNING))  # 17
    outcome = Outcome(kind=OutcomeKind.OUT_OF_MEMORY, status=1, reason="out of memory: CUDA out of memory")
    store.start_attempt(attempt(short))
    lack = MemoryLack(shortage=SHORTAGE, others=(("bob, pid 7", 2048.0), ("processes without a lease", None)))
    over = Over(before=attempt(short).last_live_phase, at=1020.0, outcome=outcome, lack=lack)
    store.set_phase(replace(attempt(short), phase=over, usage=USAGE))
    store.change_state(short, JobState.QUEUED, reason="again with 10 GB", outcome=outcome, queued_at=1020.0)
    store.set_growth(short, Growth(count=1, memory_mb=10_240.0, ram_mb=2048.0))
    learned = Profile(label="python train.py", peaks_mb=(6144.0, 6200.0), floor_mb=8192.0, ram_mb=900.0, seen_at=1020.0)
    store.learned.set_profile("4567", learned)


def _add_batch(store: JobStore) -> None:
    """Add a batch with one finished, one running and one queued run, and its state."""
    seeds = [ArrayElement(values={"index": str(index), "seed": str(70 + index)}) for index in range(3)]
    first = submit(store, replace(like(PACED), group_limit=2), seeds, token="batch")  # 18 to 20
    store.start_attempt(attempt(first))
    end_attempt(store, first, 1, SUCCEEDED, 1040.0)
    store.change_state(first, JobState.SUCCEEDED, ended_at=1040.0, outcome=SUCCEEDED)
    store.start_attempt(replace(attempt(first + 1), phase=Started(at=1030.0)))
    store.set_batch_state(first, '{"waits_s":{"cpu":12.5,"gpu-memory":3.0},"unknown":["--max-gpu"]}')


def _add_dispatched(store: JobStore) -> None:
    """Add a job that is pending at a cluster and a job that runs there."""
    for place in (None, "n0"):  # 21 and 22
        job_id = submit(store, like(ELSEWHERE))
        handed_over = HandedOver(at=1010.0)
        dispatched = replace(
            attempt(job_id), phase=handed_over, boot_id=None, lease_id=None, devices=(), engine="slurm"
        )
        store.start_attempt(dispatched)
        phase = handed_over if place is None else Started(at=1012.0, place=place)
        store.set_phase(replace(dispatched, phase=phase, site_id=f"{job_id}_0"))
        state = JobState.PENDING if place is None else JobState.RUNNING
        store.change_state(job_id, state, reason=None if place else f"slurm {job_id}_0: Resources")
