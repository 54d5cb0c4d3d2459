"""Answers about batches and their runs, tasks of workspaces, and learned estimates."""

from typing import Literal

from msgspec import Struct

from gpuyard.core.job.job import OutcomeKind
from gpuyard.core.job.lifecycle import JobState
from gpuyard.schema.queue import Iso


class LiveRun(Struct, frozen=True, kw_only=True):
    id: int
    index: str | None


class BatchStatus(Struct, frozen=True, kw_only=True):
    """`gate` is the load gate that holds the next run back, `held_by` the reason, and `device` the GPU it is about.
    `waits_s` is the time that each gate has cost so far; `unknown` names what could not be measured."""

    id: int
    first: int
    last: int
    token: str | None
    count: int
    done: bool
    counts: dict[str, int]
    running: list[LiveRun]
    gate: str | None
    held_by: str | None
    device: str | None
    device_index: int | None
    waits_s: dict[str, float]
    unknown: tuple[str, ...]
    now: Iso


class BatchRunRow(Struct, frozen=True, kw_only=True):
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
    devices: tuple[str, ...]


class BatchRunPage(Struct, frozen=True, kw_only=True):
    runs: list[BatchRunRow]
    next: int | None


class TaskRow(Struct, frozen=True, kw_only=True):
    """One task of a workspace: a job that runs one config."""

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
    devices: tuple[str, ...]
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


class TaskList(Struct, frozen=True, kw_only=True):
    tag: str
    stopped: bool
    paused: bool
    now: Iso
    tasks: list[TaskRow]


class EstimateRow(Struct, frozen=True, kw_only=True):
    """What past runs of a command, or of a program with any arguments, have taught."""

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


class EstimateList(Struct, frozen=True, kw_only=True):
    """`more`: there are estimates beyond the limit."""

    estimates: list[EstimateRow]
    more: bool


class ForgetResult(Struct, frozen=True, kw_only=True):
    forgotten: int
