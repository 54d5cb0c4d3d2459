"""The keyword arguments of `Client.submit`, for type checkers and editors: the table of submit options as types.

A test compares it with the table.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict

Whole: TypeAlias = int | str
Number: TypeAlias = float | str
Size: TypeAlias = float | str  # MB, or a text such as "8G"
Time: TypeAlias = float | str  # seconds, or a text such as "4h"
Texts: TypeAlias = str | Sequence[str]
JobIds: TypeAlias = int | str | Sequence[int | str]


class SubmitKwargs(TypedDict, total=False):
    gpus: Whole | None
    vram: Size | None
    exclusive: bool | None
    ram: Size | None
    cpus: Whole | None
    engine: str | None
    engine_option: Texts | None
    device: str | None
    vendor: Literal["nvidia", "amd", "intel", "apple", "simulated"] | None
    gpu_name: str | None
    max_cpu: Number | None
    min_free_mem_mb: Number | None
    max_gpu: Number | None
    max_gpu_mem_mb: Number | None
    max_power_w: Number | None
    priority: Whole | None
    preempt: bool | None
    on_preempt: Literal["suspend", "requeue", "never"] | None
    after: JobIds | None
    after_any: JobIds | None
    after_failed: JobIds | None
    retries: Whole | None
    time_limit: Time | None
    grace: Time | None
    duration: Time | None
    name: str | None
    tag: str | None
    array: str | None
    sweep: Texts | None
    env: Texts | None
    stdin: str | None
    on_reboot: Literal["requeue", "hold", "fail"] | None
    notify: Texts | None
    hold: bool | None
    log_cap: Size | None
    concurrency: Whole | None
    smoothing: Time | None
    steady: Time | None
    stagger: Time | None
    run_ram: Size | None
    sample_log: str | None
