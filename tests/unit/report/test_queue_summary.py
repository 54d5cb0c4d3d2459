from datetime import datetime

import pytest

from gpuyard.model.lifecycle import JobState
from gpuyard.report.failure_causes import MOST_CAUSES, count_causes, count_jobs, default_since


@pytest.mark.parametrize(
    ("now", "since"),
    [
        ("2026-11-18 09:00", "2026-11-17 18:00"),
        ("2026-11-18 17:59", "2026-11-17 18:00"),
        ("2026-11-18 23:00", "2026-11-17 18:00"),
        ("2026-11-19 00:00", "2026-11-18 18:00"),
        ("2026-11-19 00:01", "2026-11-18 18:00"),
    ],
)
def test_a_summary_begins_at_the_last_evening_that_is_six_hours_ago(now: str, since: str) -> None:
    assert default_since(datetime.fromisoformat(now)) == datetime.fromisoformat(since)


def test_jobs_of_rare_causes_are_counted_together() -> None:
    names = [chr(97 + at // 26) + chr(97 + at % 26) for at in range(MOST_CAUSES + 3)]
    *causes, rest = count_causes((at + 1, f"KeyError: '{name}'") for at, name in enumerate(names))
    assert len(causes) == MOST_CAUSES
    assert (rest.text, rest.count, rest.ids) == (None, 3, f"{MOST_CAUSES + 1}-{MOST_CAUSES + 3}")


def test_jobs_that_start_by_themselves_wait_and_others_are_counted_apart() -> None:
    counts = dict.fromkeys(JobState, 1)
    now = count_jobs(counts)
    assert (now.running, now.waiting, now.held, now.suspended) == (4, 4, 1, 1)
    assert count_jobs({}).running == 0
