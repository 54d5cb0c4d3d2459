"""The rate limit of the web page."""

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.daemon.web.page_server import Bucket


@given(st.integers(1, 50), st.floats(0.1, 100), st.lists(st.floats(0, 5, allow_nan=False), min_size=1, max_size=200))
def test_the_rate_is_never_exceeded_and_the_wait_is_enough(burst: int, per_s: float, gaps: list[float]) -> None:
    bucket, now, taken = Bucket(burst, per_s), 0.0, 0
    for gap in gaps:
        now += gap
        wait_s = bucket.take(now)
        taken += wait_s == 0
        if wait_s:
            now += wait_s + 1e-6
            assert bucket.take(now) == 0
            taken += 1
    assert taken <= burst + now * per_s + 1e-6 * len(gaps)
