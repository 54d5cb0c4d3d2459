"""The limit on open files: raised to 1,024 where that is allowed, and partly reserved."""

import resource
from collections.abc import Iterator

import pytest

from gpuyard.system.system_limits import first_reserved_descriptor, open_files_limit, raise_open_files_limit

SOFT, HARD = resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))


@pytest.mark.parametrize(("before", "after"), [(200, 1024), (1023, 1024), (1024, 1024), (1500, 1500)])
def test_a_low_limit_is_raised_to_1024_and_no_further(before: int, after: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, HARD))
    assert raise_open_files_limit() == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (after, HARD)


@pytest.mark.parametrize(("limit", "first"), [(200, 150), (256, 192), (1024, 960), (2000, 1936)])
def test_the_last_descriptors_are_reserved(limit: int, first: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, HARD))
    assert (open_files_limit(), first_reserved_descriptor()) == (limit, first)
