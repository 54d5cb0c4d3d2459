"""Answers about batches and their runs, tasks of workspaces, and learned estimates."""

from typing import Literal

from msgspec import Struct

from gpuyard.schema.jobs import JobSummary
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


class BatchRunRow(JobSummary, frozen=True, kw_only=True):
    index: str | None
    seed: str | None
    is_finished: bool
    is_live: bool
    attempts: int
    seconds: float | None


class BatchRunPage(Struct, frozen=True, kw_only=True):
    runs: list[BatchRunRow]
    next: int | None


class TaskRow(JobSummary, frozen=True, kw_only=True):
    """One task of a workspace: a job that runs one config."""

    config: str
    workspace: str
    is_live: bool
    is_waiting: bool
    is_finished: bool
    attempt: int
    priority: int
    place: str | None
    gpu_indexes: list[int | None]
    elapsed_s: float | None
    likely_s: float | None
    memory_mb: float | None
    peak_mb: float | None
    reserved_mb: float | None


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
