"""`gpuyard.Client`: a script does what a person does on the command line, over the socket or over HTTP."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuyard import Client
from gpuyard.client.fast_http import NoDaemon, NotThere
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.schema.queue import StopResult
from gpuyard.ui.cli.verbs import JOB_VERBS, SERVICE_VERBS
from tests.executables import write_executable
from tests.integration.queue_fixture import QueueUnderTest, end_leftovers

SCRIPT = """\
from gpuyard import Client
with Client() as queue:
    job = queue.submit("echo", "trained", gpus=0).first
    assert queue.wait(job).succeeded == 1
    print(queue.logs(job), end="")
"""
# Commands that are not about the queue: a script has other means for them.
NOT_FOR_SCRIPTS = {"backup", "restore", "daemon", "export", "notify", "web"}


@pytest.fixture
def client(queue: QueueUnderTest) -> Iterator[Client]:
    with Client() as made:
        yield made


@pytest.fixture(params=["own socket", "page"])
def either(queue: QueueUnderTest, request: pytest.FixtureRequest) -> Iterator[Client]:
    url = None if request.param == "own socket" else queue.post("/web", port=0)["url"]
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
        end_leftovers(own_home)


def test_a_client_has_every_verb_of_the_queue() -> None:
    assert [
        verb for verb in (*JOB_VERBS, *SERVICE_VERBS) if verb not in NOT_FOR_SCRIPTS and not hasattr(Client, verb)
    ] == []


def test_a_job_is_submitted_shown_and_waited_for(either: Client) -> None:
    submitted = either.submit("sh", "-c", "echo out; echo err >&2; exit 3", gpus=0, name="broken", time_limit="1h")
    job = submitted.first
    assert (submitted.ids, submitted.count) == (str(job), 1)
    waited = either.wait(job)
    assert (waited.done, waited.failed_count, waited.failed[0].outcome) == (True, 1, "failed")
    shown = either.show("name=broken")
    assert (shown.id, shown.state, shown.status, shown.time_limit_s) == (job, "failed", 3, 3600)
    assert shown.environment is None
    assert either.show(str(job), environment=True).environment
    assert either.why(job).summary.startswith(f"job {job} failed")
    assert [event.kind for event in either.history(job).events][:2] == ["submitted", "started"]
    assert sorted(either.logs(job).splitlines()) == ["err", "out"]
    assert either.queue(state="failed").jobs[0].id == either.queue(job).jobs[0].id == job
    assert either.queue(search="nothing-like-it", all=True).jobs == []


@pytest.mark.parametrize(("command", "expected"), [
    ((["echo", "a && b"],), "echo 'a && b'"),
    (("echo", "a && b"), "echo 'a && b'"),
    (("echo one && echo two",), "/bin/sh -c 'echo one && echo two'"),
    (("echo 'one two'",), "echo 'one two'"),
    ((["a program"],), "'a program'"),
])  # fmt: skip
def test_a_command_may_be_words_a_list_or_a_line_for_a_shell(
    either: Client, command: tuple[str | list[str], ...], expected: str
) -> None:
    assert either.preview(*command, gpus=0).jobs[0].command == expected
    assert either.show(either.submit(*command, gpus=0, hold=True).first).command == expected
    first = either.submit("true", gpus=0, hold=True).first
    assert either.show(either.resubmit(first, *command).first).command == expected


def test_a_single_word_with_a_blank_is_a_program_if_there_is_one(client: Client, tmp_path: Path) -> None:
    program = write_executable(tmp_path / "my program", "#!/bin/sh\necho ran\n")
    for command, folder in ((str(program), None), ("./my program", tmp_path)):
        job = client.submit(command, gpus=0, cwd=folder).first
        client.wait(job)
        assert client.logs(job) == "ran\n"


@pytest.mark.parametrize("command", [("sleep", 1), (["sleep", 1],), (["sleep"], ["1"])])
def test_a_command_with_something_else_than_text_is_refused(client: Client, command: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"^the command has (1|\['sleep'\]) in it") as refused:
        client.submit(*command, gpus=0)
    assert 'submit("python", "train.py", "--lr", "0.1")' in str(refused.value.hint)


def test_an_option_that_is_zero_is_sent(client: Client) -> None:
    shown = client.show(client.submit("true", gpus=0, grace=0, hold=True).first)
    assert (shown.need.devices, shown.grace_s) == (0, 0)


def test_many_jobs_are_submitted_and_changed_at_once(either: Client) -> None:
    swept = either.submit("echo", "{lr}", gpus=0, hold=True, sweep=["lr=1,2"])
    listed = either.submit(commands=["true", "false"], gpus=0, hold=True)
    filled = either.submit("echo", "{seed}", table="seed\n7\n8\n", gpus=0, hold=True, tag="night")
    assert [each.count for each in (swept, listed, filled)] == [2, 2, 2]
    assert either.queue(filled.ids).jobs[1].command == "echo 8"
    assert either.priority(swept.ids, [listed.first], to=7).count == 3
    assert either.cancel(where={"tag": "night"}).changed == filled.ids
    assert either.release(swept.first, swept.last).count == 2
    assert either.wait(swept.ids, timeout="1m").succeeded == 2
    assert not either.wait(timeout=0.01).done
    assert either.hold(listed.ids).unchanged_count == 2  # already held
    assert either.cancel("all").count == 2
    assert either.retry(swept.first).count == 1
    with pytest.raises(UserError, match="which jobs"):
        either.cancel()


def test_a_log_is_followed_through_all_attempts(either: Client, queue: QueueUnderTest) -> None:
    gate = queue.gate()
    job = either.submit("sh", "-c", f"echo begins; read word < {gate}; echo $word; exit 1", gpus=0, retries=1).first
    pieces = either.logs(job, follow=True)
    assert next(pieces) == "begins\n"
    gate.write_text("first\n")
    assert next(pieces) == "first\n"
    queue.client.request("POST", "/jobs/retry", body={"ids": str(job)})
    first_part = next(pieces)
    gate.write_text("second\n")
    assert first_part + "".join(pieces) == "begins\nsecond\n"
    assert either.logs(job, attempt=1) == "begins\nfirst\n"


def test_a_resubmitted_job_keeps_the_options_that_are_not_changed(either: Client) -> None:
    first = either.submit("echo", "one", gpus=0, environment={"LR": "3e-4"}, cwd="/tmp", tag="night").first
    again = either.resubmit(first, "echo", "two", priority=5, hold=True).first
    shown = either.show(again, environment=True)
    assert (shown.command, shown.cwd, shown.tag, shown.priority) == ("echo two", "/tmp", "night", 5)
    assert shown.environment == {"LR": "3e-4"}


def test_the_queue_as_a_whole(either: Client) -> None:
    assert either.pause().paused
    job = either.submit("true", gpus=0).first
    assert either.status().paused
    assert not either.unpause().paused
    either.wait(job)
    assert either.drain(wait=True) == replace(either.drain(), running=0)
    assert either.estimates().estimates[0].label
    learned = either.export_estimates()
    assert either.forget_estimates(all=True).forgotten == len(learned) >= 1
    assert either.import_estimates(learned).imported == len(learned)
    assert either.import_estimates(learned).kept == len(learned)
    assert either.clean(0).jobs == 1
    with pytest.raises(NotThere) as missing:
        either.show(job)
    assert missing.value.code == "not_found"
    with pytest.raises(UserError) as impossible:
        either.submit("true", vram="999G")
    assert impossible.value.code == "impossible"


def test_the_machine_and_what_ran_there(either: Client) -> None:
    either.wait(either.submit("true", vram="1G").first)
    assert [device.index for device in either.devices().devices] == [0, 1]
    assert either.device_history("1h").span_s == 3600
    ran = either.timeline("10m")
    assert (ran.until - ran.since, ran.stretches[0].job) == (600, 1)
    assert either.report(by="name").total.jobs == 1


def test_a_job_is_suspended_and_resumed(client: Client, queue: QueueUnderTest) -> None:
    job, _ = queue.start_gated(vram="1G")
    assert client.suspend(job).changed == str(job)
    queue.until_state(job, "suspended")
    assert client.resume(job).changed == str(job)
    queue.until_state(job, "running")


def test_a_local_client_s_job_has_its_directory_environment_and_files(
    client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MARK", "mine")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("typed\n")
    job = client.submit("sh", "-c", "read word; echo $PWD $MARK $word", gpus=0, stdin="words.txt").first
    client.wait(job)
    assert client.logs(job) == f"{tmp_path} mine typed\n"


def test_an_id_that_matches_no_job_or_several_is_refused(client: Client) -> None:
    client.submit("true", gpus=0, hold=True, array="0-1", name="twin")
    with pytest.raises(UserError, match="several jobs"):
        client.show("name=twin")
    with pytest.raises(UserError):
        client.show("name=missing")
    for verb in (client.wait, client.queue):
        with pytest.raises(UserError, match="no job is given"):
            verb([])
    with pytest.raises(UserError, match="no option"):
        client.submit("true", colour="red")  # type: ignore[call-arg]


def test_stop_returns_after_the_daemon_has_ended(own_queue: QueueUnderTest) -> None:
    own_queue.start()
    with Client() as client, Client(start=False) as modest:
        assert client.stop() == StopResult(stopping=True, running=0)
        own_queue.await_end()
        for ask in (modest.wait, modest.status, lambda: modest.logs(1, follow=True), lambda: Client(start=False)):
            with pytest.raises(NoDaemon):
                ask()


def test_a_client_continues_with_the_next_daemon_for_every_request(queue: QueueUnderTest) -> None:
    page = queue.post("/web", port=0)
    with Client() as near, Client(page["url"]) as far:
        first = [each.status().pid for each in (near, far)]
        queue.restart()
        queue.post("/web", port=page["port"])
        assert [each.pause().paused for each in (near, far)] == [True, True]
        assert first[0] == first[1] != near.status().pid == far.status().pid


def test_threads_and_forked_processes_can_share_a_client(either: Client) -> None:
    jobs = [either.submit("true", gpus=0, hold=True).first for _ in range(3)]

    def are_own(job: int) -> bool:
        return all(either.show(job).id == job for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(are_own, jobs[:2], timeout=60))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forking with threads
        child = os.fork()
    if child == 0:
        os._exit(0 if are_own(jobs[0]) else 1)
    assert are_own(jobs[1])
    assert os.waitpid(child, 0) == (child, 0)


def test_a_waiting_thread_does_not_block_other_threads(either: Client) -> None:
    job = either.submit("sleep", "1000", gpus=0).first
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(either.wait, job, timeout="20s")
        either.status()
        assert not waited.done()
        either.cancel(job)
        assert waited.result(60).done


def test_a_log_that_breaks_off_raises_instead_of_ending(either: Client, queue: QueueUnderTest) -> None:
    gate = queue.gate()
    job = either.submit("sh", "-c", f"echo begins; read word < {gate}", gpus=0).first
    pieces = either.logs(job, follow=True)
    assert next(pieces) == "begins\n"
    queue.restart()
    with pytest.raises(EnvironmentFault, match=r"daemon (has gone|ended before the job did)"):
        list(pieces)
    gate.write_text("on\n")


def test_over_http_a_wrong_token_is_refused_and_a_closed_port_is_an_error(queue: QueueUnderTest) -> None:
    page = queue.post("/web", port=0)
    address = page["url"].partition("/?")[0]
    with Client(address, token="wrong") as client, pytest.raises(UserError, match="needs its token"):
        client.status()
    with Client(page["url"]) as client, pytest.raises(UserError):
        client.stop()
    queue.post("/web/stop")
    with Client(page["url"]) as client, pytest.raises(EnvironmentFault, match="no daemon answers"):
        client.status()
    for url in (
        address, "ftp://127.0.0.1/?token=secret", "nonsense", "http://127.0.0.1:99999/?token=secret",
        "http://[::1/?token=secret", f"{address}/?token=secret%0d%0aX:y",
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            Client(url)
        assert "secret" not in str(caught.value)


def test_over_http_a_token_read_from_a_file_may_end_with_a_newline(queue: QueueUnderTest) -> None:
    address, _, token = queue.post("/web", port=0)["url"].partition("/?token=")
    with Client(address, token=f"{token}\n") as client:
        assert client.status().pid
