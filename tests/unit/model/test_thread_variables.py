"""Programs see how many CPUs they declared."""

import pytest

from gpuyard.model.shell_environment import thread_variables


@pytest.mark.parametrize(
    ("cpus", "environment", "variables"),
    [
        (None, {}, {}),
        (4, {}, {"GPUYARD_CPUS": "4", "OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}),
        (4, {"OMP_NUM_THREADS": "1"}, {"GPUYARD_CPUS": "4", "MKL_NUM_THREADS": "4"}),
        (0.5, {}, {"GPUYARD_CPUS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}),
    ],
)
def test_the_user_s_own_threads_stay(
    cpus: float | None, environment: dict[str, str], variables: dict[str, str]
) -> None:
    assert thread_variables(cpus, environment) == variables
