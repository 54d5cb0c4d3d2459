"""Sending of notifications: by real commands, working and broken, and by Apprise to a server of the test."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpuyard.daemon.notify import delivery
from gpuyard.daemon.notify import delivery as send_message
from gpuyard.daemon.notify.delivery import Delivery, apprise_missing, send
from gpuyard.daemon.notify.messages import Message, Occurrence
from gpuyard.installation import find_installation
from gpuyard.model.job import Job
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import JobState
from gpuyard.model.subscriptions import Event
from tests.fakes.queue_command import run
from tests.in_time import in_time
from tests.integration.queue_fixture import is_gone, until

MESSAGE = Message(
    events="failed", title="Job 17 $(touch bad) failed", body="two\nlines", jobs="17", name="`touch bad`",
    state="failed", log="/logs/17.1.log",
)  # fmt: skip


def failure(job_id: int = 17) -> Occurrence:
    spec = JobSpec(command=("train",), cwd="/", environment={}, need=Need())
    job = Job(id=job_id, spec=spec, state=JobState.FAILED, priority=0, user="ada", submitted_at=0.0)
    return Occurrence(event=Event.FAILED, at=0.0, job=job)


class Notices(list[str]):
    """The notices that the status of the daemon would list."""


class Worker:
    """A delivery in an event loop of its own, in a thread."""

    def __init__(self, notices: Notices, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.delivery = Delivery("lab", 6, notices.append, **options)

    def put(self, *addressed: tuple[str, Occurrence]) -> None:
        self.loop.call_soon_threadsafe(self.delivery.put, addressed)

    def close(self) -> None:
        if self.thread.is_alive():
            asyncio.run_coroutine_threadsafe(self.delivery.close(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()


@contextlib.contextmanager
def working_for(**options: Any) -> Iterator[tuple[Worker, Notices]]:
    notices = Notices()
    worker = Worker(notices, **options)
    try:
        yield worker, notices
    finally:
        worker.close()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# Commands


def test_a_command_gets_the_message_in_its_environment_and_on_standard_input(tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    names = ("EVENT", "TITLE", "BODY", "JOB_ID", "JOB_NAME", "JOB_STATE", "LOG")
    arguments = " ".join(f'"$GPUYARD_{name}"' for name in names)
    assert send(f"cd {tmp_path}; {{ printf '%s|' {arguments}; cat; }} > {sent}", MESSAGE) is None
    assert sent.read_text() == (
        "failed|Job 17 $(touch bad) failed|two\nlines|17|`touch bad`|failed|/logs/17.1.log|two\nlines\n"
    )
    assert os.listdir(tmp_path) == ["sent"]


def test_a_command_is_not_taken_for_a_job_of_the_queue_that_started_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_QUEUE", "/home/of/a/queue")
    assert send('test -z "$GPUYARD_QUEUE"', MESSAGE) is None


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo first; echo; echo last words >&2; exit 3", "exit status 3: last words"),
        ("kill -9 $$", "killed by signal 9"),
        ("\udfff", "cannot be started"),
    ],
)
def test_a_command_that_fails_is_reported_with_its_last_line(command: str, problem: str) -> None:
    assert str(send(command, MESSAGE)).startswith(problem)


def test_a_missing_command_is_reported() -> None:
    assert "no-such-program" in str(send("no-such-program --now", MESSAGE))


def test_a_command_that_prints_much_and_reads_nothing_ends() -> None:
    assert send("exec < /dev/null; head -c 3000000 /dev/zero", MESSAGE) is None


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = f"sleep 600 & echo $! $$ > {pids}; echo so far; wait"
    problem = None
    while not lines(pids):  # on a busy machine it may not even start
        problem = send(command, MESSAGE, limit_s=0.5)
    assert problem == "timed out after 0.5 s: so far"
    for pid in pids.read_text().split():
        until(lambda pid=int(pid): is_gone(pid), "its end")  # type: ignore[misc]


def test_background_processes_of_a_command_continue(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    assert send(f"{{ read word < {gate}; echo $word > {tmp_path}/sent; }} > /dev/null 2>&1 &", MESSAGE) is None
    gate.write_text("on\n")
    until(lambda: lines(tmp_path / "sent") == ["on"], "its end")


# The worker


def test_a_hanging_target_delays_neither_other_targets_nor_the_end(tmp_path: Path) -> None:
    sent, pid = tmp_path / "sent", tmp_path / "pid"
    with working_for(limit_s=600.0) as (worker, _):
        worker.put((f"echo $$ > {pid}; exec sleep 600", failure()), (f"cat >> {sent}", failure()))
        until(lambda: lines(pid) and lines(sent), "both")
        in_time(30.0, worker.close)
    until(lambda: is_gone(int(pid.read_text())), "the end of the hanging command")
    assert lines(sent) == ["train"]


def test_simultaneous_messages_are_merged_and_dropped_ones_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_MAX_WAITING", 3)
    sent = tmp_path / "sent"
    with working_for() as (worker, _):
        worker.put(*((f"cat >> {sent}", failure(job_id)) for job_id in range(5, 15)))
        until(lambda: len(lines(sent)) == 2, "the message")
    assert lines(sent) == ["3 jobs failed: 5-7", "7 more were dropped: too many at once"]


def test_a_failed_command_is_logged_and_the_next_message_is_still_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent = tmp_path / "sent"
    command = f"tell() {{ echo x >> {sent}; echo no luck; exit 1; }}; tell secret"
    with working_for() as (worker, notices):
        for count in (1, 2):
            worker.put((command, failure()))
            until(lambda count=count: len(_logged(caplog)) == count, "the line in the log")  # type: ignore[misc]
    assert len(lines(sent)) == 2
    assert _logged(caplog)[0] == "a notification to a command was not sent: exit status 1: no luck"
    assert notices == []


def test_a_command_that_the_system_refuses_to_start_is_started_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals, spawn = iter(range(3)), send_message._spawn

    def spawn_later(target: str, message: Message) -> "subprocess.Popen[bytes]":
        for _ in refusals:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return spawn(target, message)

    monkeypatch.setattr(send_message, "_spawn", spawn_later)
    sent = tmp_path / "sent"
    with working_for(retry_after_s=0.05) as (worker, _):
        worker.put((f"cat >> {sent}", failure()))
        until(lambda: lines(sent), "the message")
    assert len(lines(sent)) == 1
    assert _logged(caplog) == []


def test_messages_left_unsent_at_the_end_are_counted_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent = tmp_path / "sent"
    with working_for() as (worker, _):
        worker.delivery.per_minute = 1
        worker.put((f"cat >> {sent}", failure()))
        until(lambda: lines(sent), "the first")
        worker.put((f"cat >> {sent}", failure(1)), (f"cat >> {sent}", failure(2)))
    assert _logged(caplog) == ["2 notifications were not sent before the daemon stopped"]


def _logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Apprise


class Service:
    """A server that records the requests and all command lines meanwhile, and answers as configured."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.bodies: list[dict[str, Any]] = []
        self.command_lines = b""

    def take(self, body: bytes) -> int:
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                self.command_lines += Path(f"/proc/{name}/cmdline").read_bytes()
        self.bodies.append(json.loads(body))
        return self.answers.pop(0) if self.answers else 200


@pytest.fixture
def service() -> Iterator[tuple[Service, str]]:
    """The server, and its URL with a secret."""
    seen = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status = seen.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield seen, f"json://ada:pass-phrase@127.0.0.1:{server.server_address[1]}/hidden-path"
        server.shutdown()
        thread.join()


def test_apprise_sends_to_a_url_that_appears_in_no_process_list(service: tuple[Service, str]) -> None:
    seen, url = service
    assert send(url, MESSAGE) is None
    assert [(body["title"], body["message"]) for body in seen.bodies] == [(MESSAGE.title, MESSAGE.body)]
    assert b"apprise_process" in seen.command_lines
    assert b"hidden-path" not in seen.command_lines


def test_a_failed_service_is_retried_once(service: tuple[Service, str], caplog: pytest.LogCaptureFixture) -> None:
    seen, url = service
    seen.answers = [500]
    with working_for(retry_after_s=0.0) as (worker, _):
        worker.put((url, failure()))
        until(lambda: len(seen.bodies) == 2, "the second time")
        until(lambda: not worker.delivery._in_flight, "its end")
    assert seen.bodies[0]["title"] == seen.bodies[1]["title"] == "Job 17 failed on lab"
    assert _logged(caplog) == []


def test_a_service_that_fails_twice_is_reported_without_its_secrets(
    service: tuple[Service, str], caplog: pytest.LogCaptureFixture
) -> None:
    seen, url = service
    seen.answers = [500, 500]
    with working_for(retry_after_s=0.0) as (worker, _):
        worker.put((url, failure()))
        until(lambda: _logged(caplog), "the line in the log")
    assert len(seen.bodies) == 2
    (message,) = _logged(caplog)
    assert message.startswith("a notification to json://… was not sent: exit status 1: ")
    assert not any(secret in message for secret in ("ada", "pass-phrase", "hidden-path"))


def test_an_address_in_a_service_s_error_is_not_repeated() -> None:
    problem = str(send("json://127.0.0.1:1/hidden-path", MESSAGE))
    assert "Connection error" in problem
    assert "127.0.0.1" not in problem


@pytest.mark.parametrize("url", ["no-such-service://hidden-part", " slack://hidden-part"])
def test_a_url_that_apprise_cannot_parse_is_reported_without_its_secrets(url: str) -> None:
    problem = str(send(url, MESSAGE))
    assert "Apprise does not understand this URL" in problem
    assert "hidden-part" not in problem


def test_a_missing_apprise_is_reported_once_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    sent = tmp_path / "sent"
    with working_for() as (worker, notices):
        for count in (1, 2):
            worker.put(("ntfy://topic", failure()), (f"cat >> {sent}", failure()))
            until(lambda count=count: len(lines(sent)) == count, "the other target")  # type: ignore[misc]
    assert notices == [apprise_missing()] == _logged(caplog)
    assert find_installation().with_extra("notify") in str(send("ntfy://topic", MESSAGE))


# gpuyard notify


def test_notify_test_prints_the_result_of_each_target(own_home: Path) -> None:
    own_home.mkdir()
    (own_home / "config.toml").write_text(f'[notify]\nto = ["cat > {own_home}/sent", "echo no luck; false"]\n')
    result = run("notify", "test")
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout == "cat: sent\necho: exit status 1: no luck\n"
    assert "gpuyard" in (own_home / "sent").read_text()
    result = run("notify", "test", "--json", f"cat > {own_home}/other")
    assert (result.returncode, json.loads(result.stdout)) == (0, {"sent": [{"target": "cat", "problem": None}]})
    assert not (own_home / "daemon.sock").exists()


def test_notify_explains_its_usage_on_wrong_arguments_and_without_targets(own_home: Path) -> None:
    for arguments, hint in (
        (["test"], "[notify]"),
        ([], "notify test"),
        (["x"], "notify test"),
        (["test", "a", "b"], "test"),
    ):
        result = run("notify", *arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert hint in result.stderr.splitlines()[-1]
