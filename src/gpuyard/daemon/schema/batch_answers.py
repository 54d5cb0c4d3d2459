"""Batches and their runs, the tasks of workspaces, and what was learned from all that ran."""

from typing import Literal, TypedDict

from gpuyard.core.job.job import OutcomeKind
from gpuyard.core.job.lifecycle import JobState
from gpuyard.daemon.schema.queue_answers import Counts, Iso


class BatchRunning(TypedDict):
    id: int
    index: str | None


class Batch(TypedDict):
    id: int
    first: int
    last: int
    token: str | None
    count: int
    done: bool
    counts: Counts
    running: list[BatchRunning]
    gate: str | None
    held_by: str | None
    device: str | None
    device_index: int | None
    waits_s: dict[str, float]
    unknown: list[str]
    now: Iso


class BatchRun(TypedDict):
    id: int
    index: str | None
    seed: str | None
    state: JobState
    is_finished: bool
    is_live: bool
    outcome: OutcomeKind | None
    status: int | None
    reason: str | None
    attempts: int
    submitted_at: Iso
    started_at: Iso | None
    ended_at: Iso | None
    seconds: float | None
    log: str | None
    devices: list[str]


class BatchRuns(TypedDict):
    runs: list[BatchRun]
    next: int | None


class TaskRow(TypedDict):
    id: int
    config: str
    workspace: str
    state: JobState
    is_live: bool
    is_waiting: bool
    is_finished: bool
    outcome: OutcomeKind | None
    status: int | None
    reason: str | None
    attempt: int
    priority: int
    devices: list[str]
    place: str | None
    gpu_indexes: list[int | None]
    submitted_at: Iso
    started_at: Iso | None
    ended_at: Iso | None
    elapsed_s: float | None
    likely_s: float | None
    memory_mb: float | None
    peak_mb: float | None
    reserved_mb: float | None
    log: str | None


class Tasks(TypedDict):
    tag: str
    stopped: bool
    paused: bool
    now: Iso
    tasks: list[TaskRow]


class Estimate(TypedDict):
    fingerprint: str
    label: str
    kind: Literal["command", "program"]
    runs: int
    measured_runs: int
    memory_mb: float | None
    peak_mb: float | None
    floor_mb: float | None
    ram_mb: float | None
    load_percent: float | None
    least_s: float | None
    mean_s: float | None
    most_s: float | None
    predicted_mb: float | None
    actual_mb: float | None
    off_percent: float | None
    seen_at: Iso | None


class Estimates(TypedDict):
    estimates: list[Estimate]
    more: bool


class Forgotten(TypedDict):
    forgotten: int
