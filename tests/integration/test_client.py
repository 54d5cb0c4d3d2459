"""`gpuyard.Client`: a script does with the queue what a person does on the command line, over either way to it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard import Client
from gpuyard.daemon.client import NoDaemon, NotThere
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ui.cli import QUEUE_VERBS
from tests.integration.queue_fixture import Yard, end_what_is_left

SCRIPT = """\
from gpuyard import Client
with Client() as yard:
    job = yard.submit("echo", "trained", gpus=0)["first"]
    assert yard.wait(job)["succeeded"] == 1
    print(yard.logs(job), end="")
"""
# What is no question to the queue: a script has other means for it.
NOT_FOR_SCRIPTS = {"daemon", "export", "notify", "web"}


@pytest.fixture
def client(yard: Yard) -> Iterator[Client]:
    with Client() as made:
        yield made


@pytest.fixture(params=["own socket", "page"])
def either(yard: Yard, request: pytest.FixtureRequest) -> Iterator[Client]:
    url = None if request.param == "own socket" else yard.post("/web", port=0)["url"]
    with Client(url) as made:
        yield made


def test_five_lines_submit_wait_and_read_the_log_and_no_daemon_need_run(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    try:
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
        assert (done.stdout, done.stderr, done.returncode) == ("trained\n", "", 0)
    finally:
        end_what_is_left(own_home)


def test_a_client_has_every_verb_of_the_queue() -> None:
    assert [verb for verb in QUEUE_VERBS if verb not in NOT_FOR_SCRIPTS and not hasattr(Client, verb)] == []


def test_a_job_is_submitted_asked_about_and_waited_for(either: Client) -> None:
    told = either.submit("sh", "-c", "echo out; echo err >&2; exit 3", gpus=0, name="broken", time_limit="1h")
    job = told["first"]
    assert (told["ids"], told["count"]) == (str(job), 1)
    waited = either.wait(job)
    assert (waited["done"], waited["failed_count"], waited["failed"][0]["outcome"]) == (True, 1, "failed")
    shown = either.show("name=broken")
    assert (shown["id"], shown["state"], shown["status"], shown["time_limit_s"]) == (job, "failed", 3, 3600)
    assert shown["environment"] is None
    assert either.show(str(job), environment=True)["environment"]
    assert either.why(job)["summary"].startswith(f"job {job} failed")
    assert [event["kind"] for event in either.story(job)["events"]][:2] == ["submitted", "started"]
    assert sorted(either.logs(job).splitlines()) == ["err", "out"]
    assert either.queue(state="failed")["jobs"][0]["id"] == either.queue(job)["jobs"][0]["id"] == job
    assert either.queue(search="nothing-like-it", all=True)["jobs"] == []


def test_many_are_submitted_and_changed_at_once(either: Client) -> None:
    swept = either.submit("echo", "{lr}", gpus=0, hold=True, sweep=["lr=1,2"])
    listed = either.submit(commands=["true", "false"], gpus=0, hold=True)
    filled = either.submit("echo", "{seed}", table="seed\n7\n8\n", gpus=0, hold=True, tag="night")
    assert [each["count"] for each in (swept, listed, filled)] == [2, 2, 2]
    assert either.queue(filled["ids"])["jobs"][1]["command"] == "echo 8"
    assert either.priority(swept["ids"], [listed["first"]], to=7)["count"] == 3
    assert either.cancel(where={"tag": "night"})["changed"] == filled["ids"]
    assert either.release(swept["first"], swept["last"])["count"] == 2
    assert either.wait(swept["ids"], timeout="1m")["succeeded"] == 2
    assert not either.wait(timeout=0.01)["done"]
    assert either.hold(listed["ids"])["unchanged_count"] == 2  # they are held already
    assert either.cancel("all")["count"] == 2
    assert either.retry(swept["first"])["count"] == 1
    with pytest.raises(UserError, match="which jobs"):
        either.cancel()


def test_a_log_is_followed_through_all_attempts(either: Client, yard: Yard) -> None:
    gate = yard.gate()
    job = either.submit("sh", "-c", f"echo begins; read word < {gate}; echo $word; exit 1", gpus=0, retries=1)["first"]
    pieces = either.logs(job, follow=True)
    assert next(pieces) == "begins\n"
    gate.write_text("first\n")
    assert next(pieces) == "first\n"
    yard.client.request("POST", "/jobs/retry", body={"ids": str(job)})
    heard = next(pieces)
    gate.write_text("second\n")
    assert heard + "".join(pieces) == "begins\nsecond\n"
    assert either.logs(job, attempt=1) == "begins\nfirst\n"


def test_what_is_resubmitted_keeps_what_is_not_changed(either: Client) -> None:
    first = either.submit("echo", "one", gpus=0, environment={"LR": "3e-4"}, cwd="/tmp", tag="night")["first"]
    again = either.resubmit(first, "echo", "two", priority=5, hold=True)["first"]
    shown = either.show(again, environment=True)
    assert (shown["command"], shown["cwd"], shown["tag"], shown["priority"]) == ("echo two", "/tmp", "night", 5)
    assert shown["environment"] == {"LR": "3e-4"}


def test_the_queue_as_a_whole(either: Client) -> None:
    assert either.pause()["paused"]
    job = either.submit("true", gpus=0)["first"]
    assert either.status()["paused"]
    assert not either.unpause()["paused"]
    either.wait(job)
    assert either.drain(wait=True) == {**either.drain(), "running": 0}
    assert either.estimates()["estimates"][0]["label"]
    assert either.forget_estimates(all=True)["forgotten"] >= 1
    assert either.clean(0)["jobs"] == 1
    with pytest.raises(NotThere):
        either.show(job)


def test_the_machine_and_what_ran_there(either: Client) -> None:
    either.wait(either.submit("true", vram="1G")["first"])
    assert [device["index"] for device in either.devices()["devices"]] == [0, 1]
    assert either.history("1h")["span_s"] == 3600
    ran = either.timeline("10m")
    assert (ran["until"] - ran["from"], ran["stretches"][0]["job"]) == (600, 1)
    assert either.report(by="name")["total"]["jobs"] == 1


def test_a_job_is_suspended_and_resumed(client: Client, yard: Yard) -> None:
    job, _ = yard.start_gated(gpus=0)
    answer = client.suspend(job)
    assert answer["count"] + answer["unchanged_count"] == 1
    answer = client.resume(job)
    assert answer["count"] + answer["unchanged_count"] == 1


def test_a_job_of_a_near_client_has_its_folder_and_its_variables(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARK", "mine")
    job = client.submit("sh", "-c", "echo $PWD $MARK", gpus=0)["first"]
    client.wait(job)
    assert client.logs(job) == f"{os.getcwd()} mine\n"


def test_who_means_none_or_several_is_told_so(client: Client) -> None:
    client.submit("true", gpus=0, hold=True, array="0-1", name="twin")
    with pytest.raises(UserError, match="several"):
        client.show("name=twin")
    with pytest.raises(UserError):
        client.show("name=nobody")
    with pytest.raises(UserError, match="no option"):
        client.submit("true", colour="red")


def test_the_daemon_is_stopped_and_has_ended_by_then(own_yard: Yard) -> None:
    own_yard.start()
    with Client() as client:
        assert client.stop() == {"stopping": True, "running": 0}
    own_yard.await_end()
    with pytest.raises(NoDaemon):
        Client(start=False)


def test_over_the_page_a_wrong_token_is_refused_and_nobody_is_no_answer(yard: Yard) -> None:
    page = yard.post("/web", port=0)
    address = page["url"].partition("/?")[0]
    with Client(address, token="wrong") as client, pytest.raises(UserError, match="locked"):
        client.status()
    with Client(page["url"]) as client, pytest.raises(UserError):
        client.stop()
    yard.post("/web/stop")
    with Client(page["url"]) as client, pytest.raises(EnvironmentFault, match="no daemon answers"):
        client.status()
    for url in (address, "ftp://127.0.0.1/?token=x", "nonsense"):
        with pytest.raises(UserError):
            Client(url)
