"""The progress of a sweep or an array in one line, and the state that stands for all its jobs."""

import pytest

from gpuyard.daemon.api.sweeps import group_state, progress_text
from gpuyard.model.lifecycle import JobState


@pytest.mark.parametrize(
    ("counts", "state", "text"),
    [
        ({"succeeded": 10, "failed": 2, "running": 3, "stopping": 1, "queued": 24}, "running",
         "12/40 done, 2 failed, 4 running"),
        ({"pending": 8}, "pending", "0/8 done, 8 pending"),
        ({"running": 2, "pending": 5, "succeeded": 1}, "running", "1/8 done, 5 pending, 2 running"),
        ({"queued": 5, "held": 2}, "queued", "0/7 done, 2 held"),
        ({"succeeded": 3, "failed": 1}, "failed", "4/4 done, 1 failed"),
        ({"succeeded": 3, "cancelled": 1}, "cancelled", "4/4 done, 1 cancelled"),
        ({"succeeded": 1200}, "succeeded", "1,200/1,200 done"),
        ({"suspended": 1, "rejected": 1}, "suspended", "1/2 done, 1 rejected, 1 suspended"),
    ],
)  # fmt: skip
def test_progress_names_what_matters(counts: dict[str, int], state: str, text: str) -> None:
    by_state = {JobState(each): jobs for each, jobs in counts.items()}
    assert (group_state(by_state), progress_text(by_state)) == (state, text)


@pytest.mark.parametrize("state", list(JobState))
def test_a_group_of_jobs_in_one_state_has_that_state(state: JobState) -> None:
    assert group_state({state: 3}) is state
