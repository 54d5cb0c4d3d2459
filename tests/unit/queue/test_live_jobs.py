"""The indexes of live jobs are never other than those of the same jobs added anew."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.job import Usage
from gpuyard.model.lifecycle import JobState
from gpuyard.queue.live_attempts import Live, LiveJobs
from tests.unit.policy.test_sizing import attempt, job

_IDS = st.integers(1, 3)
_lives = st.builds(
    lambda job_id, state, devices, reserved_mb, predicted_mb, stop_at: Live(
        job=replace(job(), id=job_id, state=state),
        attempt=replace(
            attempt(),
            job_id=job_id,
            devices=devices,
            lease_id=f"L{job_id}" if devices else None,
            reserved_mb=reserved_mb,
            predicted_mb=predicted_mb,
            stop_at=stop_at,
        ),
    ),
    _IDS,
    st.sampled_from([JobState.RUNNING, JobState.SUSPENDED, JobState.STOPPING]),
    st.sampled_from([(), ("G0",), ("G0", "G1")]),
    st.sampled_from([None, 1000.0]),
    st.sampled_from([None, 900.0]),
    st.sampled_from([None, 5.0]),
)
_usages = st.builds(lambda mb: Usage(peaks_mb={"G0": mb}), st.sampled_from([500.0, 1500.0]))


@given(changes=st.lists(st.one_of(_lives, st.tuples(_IDS, _usages), _IDS), max_size=12))
def test_indexes_follow_every_change(changes: list[Live | tuple[int, Usage] | int]) -> None:
    jobs = LiveJobs()
    for change in changes:
        if isinstance(change, Live):
            jobs[change.job.id] = change
        elif isinstance(change, tuple) and change[0] in jobs:
            jobs.set_usage(*change)
        elif isinstance(change, int) and change in jobs:
            jobs.take(change)
        anew = LiveJobs(jobs.values())
        assert jobs.apart == anew.apart
        assert jobs.unpredicted == anew.unpredicted
        assert jobs.outgrown == anew.outgrown
        assert jobs.without_devices == anew.without_devices
        assert jobs.on_device == anew.on_device
        assert jobs.by_lease == anew.by_lease


def test_the_lease_of_a_job_is_that_of_the_next_one_in_its_slice_from_its_start_on() -> None:
    before, after = (
        Live(job=replace(job(), id=job_id), attempt=replace(attempt(), job_id=job_id, devices=("G0",), lease_id="L1"))
        for job_id in (1, 2)
    )
    jobs = LiveJobs([before, after])
    jobs.set_usage(1, Usage(peaks_mb={"G0": 500.0}))
    assert jobs.by_lease == {"L1": after}
    jobs.take(1)
    assert jobs.by_lease == {"L1": after}
    jobs.take(2)
    assert jobs.by_lease == {}
