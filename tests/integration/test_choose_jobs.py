"""Jobs are chosen by ids and conditions, on every verb, with a real daemon."""

import json

import pytest

from tests.fakes.queue_command import run_here
from tests.integration.queue_fixture import QueueUnderTest


@pytest.fixture
def night(queue: QueueUnderTest) -> QueueUnderTest:
    """Jobs 1 to 6, tagged night: 1, 2 and 4 failed, 3 and 5 succeeded, 6 was cancelled; job 7 failed, without a tag."""
    for script in ("echo a; exit 3", "echo b; exit 4", "true", "echo d; exit 3", "true"):
        queue.shell(script, gpus=0, tag="night", name="train")
    queue.shell("true", gpus=0, tag="night", hold=True)
    queue.post("/jobs/cancel", ids="6")
    queue.shell("exit 1", gpus=0)
    queue.wait()
    return queue


def ids_of(*words: str) -> list[int]:
    return [job["id"] for job in json.loads(run_here("queue", "--json", *words).stdout)["jobs"]]


def test_all_conditions_hold_together_and_narrow_the_ids(night: QueueUnderTest) -> None:
    assert ids_of("state=failed") == [1, 2, 4, 7]
    assert ids_of("state=failed", "tag=night") == [1, 2, 4]
    assert ids_of("2-7", "state=failed,cancelled", "tag=night") == [2, 4, 6]
    assert ids_of("name=train", "state=succeeded", "since=1h") == [3, 5]
    assert ids_of("all", "state=cancelled") == [6]
    assert ids_of("since=2020-01-01", "state=failed", "1-3") == [1, 2]


def test_a_selection_that_matches_nothing_says_so_on_every_verb(night: QueueUnderTest) -> None:
    for verb in ("retry", "cancel", "hold", "wait", "show", "logs", "why", "history"):
        result = run_here(verb, "state=running", "tag=night")
        assert (result.returncode, result.stdout) == (3, "")
        assert "no job matches state=running tag=night" in result.stderr
    listed = run_here("queue", "state=running")
    assert (listed.returncode, "no jobs match" in listed.stdout) == (0, True)
    among = run_here("retry", "3-5", "tag=day")
    assert "no job matches tag=day among these ids" in among.stderr


def test_show_logs_and_wait_take_conditions(night: QueueUnderTest) -> None:
    shown = json.loads(run_here("show", "state=failed", "tag=night", "--json").stdout)
    assert [job["id"] for job in shown] == [1, 2, 4]
    logs = run_here("logs", "state=failed", "1-2").stdout
    assert logs == "==> 1 train: failed <==\na\n==> 2 train: failed <==\nb\n"
    assert run_here("wait", "state=succeeded", "tag=night").returncode == 0
    assert run_here("wait", "tag=night").returncode == 5


def test_a_retry_of_a_tag_leaves_successes_alone_and_counts_them(night: QueueUnderTest) -> None:
    night.post("/pause")
    result = run_here("retry", "tag=night")
    assert result.stdout == "queued again 1-2 4\n"
    assert "2 succeeded and 1 cancelled are left alone; --all retries them too" in result.stderr
    run_here("cancel", "1-2", "4")
    nothing = run_here("retry", "3-5", "state=succeeded,failed", "--json")
    assert json.loads(nothing.stdout)["changed"] == "3 5"
    run_here("cancel", "state=queued")
    none_failed = run_here("retry", "1-6")
    assert (none_failed.returncode, none_failed.stdout) == (1, "")
    assert "no job failed; 6 cancelled are left alone" in none_failed.stderr
    assert run_here("retry", "1-6", "--all").stdout == "queued again 1-6\n"
    night.post("/unpause")


def test_a_job_that_is_named_by_its_id_is_retried_whatever_became_of_it(night: QueueUnderTest) -> None:
    result = run_here("retry", "3", "5")
    assert (result.stdout, result.stderr) == ("queued again 3 5\n", "")
    night.wait()


def test_a_bad_condition_is_named_before_anything_happens(night: QueueUnderTest) -> None:
    for word, problem in (("state=broken", "not a state"), ("since=soon", "not a time"), ("tga=x", "names no job")):
        result = run_here("cancel", word)
        assert result.returncode == 2
        assert problem in result.stderr
