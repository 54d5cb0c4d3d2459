"""Dependencies on sets of jobs, and what a retry revives, with real jobs."""

from pathlib import Path

import pytest

from gpuyard.errors import UserError
from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest


def fails_until(marker: Path) -> str:
    return f"[ -e {marker} ]"


def test_a_retry_revives_the_chain_that_was_skipped_and_says_how_many(queue: QueueUnderTest, tmp_path: Path) -> None:
    marker = tmp_path / "fixed"
    first = queue.shell(fails_until(marker), gpus=0)
    second = queue.submit("true", gpus=0, after=first)
    third = queue.submit("true", gpus=0, after=second)
    other = queue.submit("true", gpus=0, after_failed=first)
    queue.wait()
    assert queue.counts() == {"failed": 1, "rejected": 2, "succeeded": 1}
    only = run("retry", "--only", str(first))
    assert only.stdout == f"queued again {first}\n"
    queue.wait()
    assert [queue.state(job_id) for job_id in (second, third)] == ["rejected", "rejected"]
    marker.touch()
    queue.post("/pause")
    again = run("retry", f"{first}-{second}", "--json")
    assert f'"revived": "{third}"' in again.stdout
    assert [queue.state(job_id) for job_id in (first, second, third)] == ["queued", "blocked", "blocked"]
    run("cancel", f"{first}")
    assert queue.counts() == {"cancelled": 1, "rejected": 2, "succeeded": 1}
    text = run("retry", str(first))
    assert text.stdout == f"queued again {first}; 2 skipped jobs wait again: {second}-{third}\n"
    queue.post("/unpause")
    assert queue.wait(f"{first}-{other}")["succeeded"] == 4


def test_one_failure_in_an_array_starts_what_waits_for_a_failure(queue: QueueUnderTest) -> None:
    gate = queue.gate()
    script = f"[ $GPUYARD_ARRAY_INDEX != 1 ] || exit 1; [ $GPUYARD_ARRAY_INDEX != 2 ] || read word < {gate}"
    array = queue.send("/bin/sh", "-c", script, gpus=0, array="0-2", tag="night")
    alarm = queue.submit("true", gpus=0, after_failed="tag=night")
    assert queue.wait(alarm)["succeeded"] == 1  # while one job of the array still runs
    gate.write_text("go\n")
    queue.wait()
    none = queue.send("true", gpus=0, after_failed=f"{array['first']} {array['last']}")
    assert none["notes"] == [
        f"it will never start: skipped: none of the dependencies {array['first']} {array['last']} failed (one had to)"
    ]


def test_a_job_that_is_retried_by_itself_is_waited_for_to_its_last_attempt(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    queue.post("/pause")
    marker = tmp_path / "tried"
    first = queue.shell(f"{fails_until(marker)} || {{ : > {marker}; exit 1; }}", gpus=0, retries=1)
    good, bad = (queue.submit("true", gpus=0, **{name: first}) for name in ("after", "after_failed"))
    queue.post("/unpause")
    queue.wait()
    assert [queue.state(job_id) for job_id in (first, good, bad)] == ["succeeded", "succeeded", "rejected"]


def test_each_job_of_an_array_waits_for_the_job_with_its_own_index(queue: QueueUnderTest) -> None:
    gate = queue.gate()
    script = f"case $GPUYARD_ARRAY_INDEX in 4) exit 1 ;; 6) read word < {gate} ;; esac"
    first = queue.send("/bin/sh", "-c", script, gpus=0, array="2-6:2")
    second = queue.send("true", gpus=0, array="2-6:2", after_each=first["ids"])
    ids = range(second["first"], second["last"] + 1)
    queue.until_state(ids[1], "rejected")
    queue.until_state(ids[0], "succeeded")
    assert queue.state(ids[2]) == "blocked"
    late = queue.send("true", gpus=0, array="2-6:2", after_each=first["ids"])  # two of the three have ended by now
    gate.write_text("go\n")
    queue.wait()
    states = ["succeeded", "rejected", "succeeded"]
    assert [queue.state(job_id) for job_id in ids] == states
    assert [queue.state(job_id) for job_id in range(late["first"], late["last"] + 1)] == states
    assert queue.job(ids[1])["reason"] == f"skipped: dependency {first['first'] + 1} failed"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"array": "0-3"}, "the jobs of --after-each have no index 3"),
        ({"array": "1-2"}, "this array has no index 0"),
        ({"array": "5-6"}, "the jobs of --after-each have no index 5-6, and this array has no index 0-2"),
        ({}, "these jobs have none"),
        ({"after_each": "4", "array": "0-2"}, "job 4 has none"),
    ],
)
def test_arrays_whose_indexes_do_not_match_are_refused(
    queue: QueueUnderTest, options: dict[str, str], why: str
) -> None:
    queue.send("true", gpus=0, array="0-2")
    queue.submit("true", gpus=0)
    with pytest.raises(UserError, match=why):
        queue.send("true", gpus=0, **{"after_each": "1-3", **options})
