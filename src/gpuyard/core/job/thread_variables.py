"""Environment variables that tell programs how many CPUs they have."""

from collections.abc import Mapping

CPUS_VARIABLE = "GPUYARD_CPUS"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def thread_variables(cpus: float | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a program with this many declared CPUs, without those that the user has set."""
    if cpus is None:
        return {}
    count = str(max(1, int(cpus)))
    return {CPUS_VARIABLE: count, **{name: count for name in _THREADS if name not in environment}}
