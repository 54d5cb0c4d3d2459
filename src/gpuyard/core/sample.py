"""A sample: one snapshot of the machine together with smoothed load, as the scheduler and `gpuyard watch` use it."""

from collections.abc import Mapping

from msgspec import Struct

from gpuyard.core.snapshot import Problem, Snapshot


class Sample(Struct, frozen=True, kw_only=True):
    """`snapshot` is raw. `cpu_percent`, `loads` (percent) and `powers_w` (both by device id) are smoothed.

    `new_problems` are the problems that the sample before did not have. `ram_mb` is the RAM that the processes of each
    live attempt hold, by (job id, attempt number); only the daemon measures it.
    """

    snapshot: Snapshot
    cpu_percent: float | None = None
    loads: Mapping[str, float | None] = {}
    powers_w: Mapping[str, float | None] = {}
    new_problems: tuple[Problem, ...] = ()
    ram_mb: Mapping[tuple[int, int], float] = {}
