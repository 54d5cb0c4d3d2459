"""A command and a daemon of different versions detect the mismatch and print what to do."""

import asyncio
import contextlib
import json
import logging
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard import Client
from gpuyard.client import restart_daemon as version_mismatch
from gpuyard.client.daemon_liveness import running_pid
from gpuyard.client.fast_http import AT_LEAST_FIELD, TOO_OLD, VERSION_FIELD, NotThere
from gpuyard.client.restart_daemon import with_missing_keys_explained
from gpuyard.daemon.server.http_messages import Request, Response
from gpuyard.errors import EnvironmentFault
from gpuyard.ui.tui.streams import DaemonStream
from gpuyard.version import __version__
from tests.fakes.daemon import served, status_of
from tests.fakes.other_version import command_of, daemon_of
from tests.fakes.queue_command import GPUYARD, run
from tests.fakes.queue_standin import Refusal, StandIn, counts, page
from tests.integration.queue_fixture import DEADLINE_S, Daemon, QueueUnderTest

pytestmark = pytest.mark.usefixtures("unmeasured")

OLD, NEW = "0.0.1", "999.0"
RESTARTED = f"gpuyard: restarted the daemon: it was version {OLD}, this command is version {__version__}\n"
DAEMON_IS_OLDER = (
    f"the daemon is version {OLD}, this command is version {__version__}: "
    "`gpuyard daemon restart` (running jobs go on)"
)  # fmt: skip


@pytest.fixture(autouse=True)
def _forget_printed_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the record of printed notices, as in a new process."""
    monkeypatch.setattr(version_mismatch, "_notices", set())


@pytest.fixture
def stand_in(own_home: Path) -> Iterator[StandIn]:
    """An older daemon that is busy."""
    with StandIn(own_home) as daemon:
        daemon.version = OLD
        daemon.answers["GET /status"] = {"pid": 1, "version": OLD, "managed": False, "counts": counts(running=1)}
        yield daemon


def serving(version: str, kind: str = "daemon") -> Daemon:
    daemon = Daemon(daemon_of(version, kind))
    assert daemon.serves(), daemon.log
    return daemon


@pytest.fixture
def queue_at(home: Path) -> Iterator[QueueUnderTest]:
    """A connection to the daemon that prints no version notices."""
    queue = QueueUnderTest(home)
    queue.client.on_notice = lambda _: None
    yield queue
    queue.client.close()


def pid_in(home: Path) -> int | None:
    return running_pid(home / "daemon.lock")


# A newer command


def test_it_restarts_an_idle_older_daemon_and_then_submits(home: Path, queue_at: QueueUnderTest) -> None:
    daemon = serving(OLD)
    held = queue_at.submit("true", gpus=0, hold=True)

    result = run("submit", "--gpus", "0", "--json", "--", "true")

    assert (result.returncode, result.stderr) == (0, RESTARTED)
    assert json.loads(result.stdout)["first"] == held + 1
    assert daemon.wait() == 0
    assert f"for a restart: a newer command, version {__version__} in {sys.prefix}" in daemon.log
    status = json.loads(run("daemon", "status", "--json").stdout)
    assert (status["version"], status["pid"]) == (__version__, pid_in(home))
    assert run("queue").stderr == ""


def test_it_leaves_a_daemon_alone_whose_database_it_cannot_read(home: Path, queue_at: QueueUnderTest) -> None:
    daemon = serving(OLD)
    held = queue_at.submit("true", gpus=0, hold=True)
    with contextlib.closing(sqlite3.connect(home / "queue.db", isolation_level=None)) as database:
        database.execute("PRAGMA user_version = 1")
        database.execute("PRAGMA wal_checkpoint(PASSIVE)")

    result = run("queue", "--json")

    assert result.returncode == 0
    assert "the daemon stays: an unreleased gpuyard made " in result.stderr
    assert "it has schema 1, " in result.stderr
    assert "`gpuyard daemon stop`, then move it away: mv " in result.stderr
    assert [each["id"] for each in json.loads(result.stdout)["jobs"]] == [held]
    refused = run("daemon", "restart")
    assert refused.returncode == 1
    assert "it has schema 1, " in refused.stderr
    assert pid_in(home) == daemon.pid
    assert run("daemon", "stop").returncode == 0
    assert daemon.wait() == 0


def test_it_leaves_a_busy_daemon_alone_and_a_job_survives_a_manual_restart(
    home: Path, queue_at: QueueUnderTest
) -> None:
    daemon, queue = serving(OLD), queue_at
    job, gate = queue.start_gated(gpus=0)
    process = queue.job(job)["attempts"][0]["pid"]

    result = run("queue", "--json")
    assert (result.returncode, result.stderr) == (0, f"gpuyard: {DAEMON_IS_OLDER}\n")
    assert [each["id"] for each in json.loads(result.stdout)["jobs"]] == [job]
    assert pid_in(home) == daemon.pid
    assert run("wait", "--timeout", "0s").stderr.count(DAEMON_IS_OLDER) == 1
    assert f"version: {OLD} (this command is {__version__})" in run("daemon", "status").stdout

    result = run("daemon", "restart")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"daemon restarted (pid {pid_in(home)}, version {__version__}); 1 job still running\n"
    assert daemon.wait() == 0
    assert [each["pid"] for each in queue.job(job)["attempts"]] == [process]
    gate.write_text("go\n")
    queue.wait(job)
    assert queue.state(job) == "succeeded"


def test_commands_at_the_same_time_restart_it_once_and_all_succeed(home: Path) -> None:
    daemon = serving(OLD)
    commands = [
        subprocess.Popen([*GPUYARD, "submit", "--hold", "--", "true"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(6)
    ]
    outputs = [command.communicate(timeout=DEADLINE_S) for command in commands]
    assert sorted(int(out) for out, _ in outputs) == [1, 2, 3, 4, 5, 6]
    assert {err.decode() for _, err in outputs} <= {RESTARTED, ""}
    assert daemon.wait() == 0
    assert (home / "daemon.log").read_text().count("the daemon is running") == 1


def test_a_daemon_without_a_version_header_counts_as_older(home: Path) -> None:
    daemon = serving(OLD, "silent")
    result = run("queue")
    assert result.stderr == (
        f"gpuyard: restarted the daemon: it was an older version, this command is version {__version__}\n"
    )
    assert daemon.wait() == 0
    assert pid_in(home) not in (None, daemon.pid)


def test_a_daemon_under_a_service_manager_is_not_restarted(home: Path) -> None:
    daemon = serving(OLD, "run")
    result = run("queue")
    assert (result.returncode, result.stderr) == (0, f"gpuyard: {DAEMON_IS_OLDER}\n")
    assert pid_in(home) == daemon.pid
    assert daemon.kill(15) == 0


def test_an_error_of_an_older_daemon_names_both_versions(stand_in: StandIn) -> None:
    stand_in.answers["POST /submissions"] = Refusal(400, "unknown option 'colour'", "see --help")
    result = run("submit", "--", "true")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"gpuyard: unknown option 'colour'\n  see --help; {DAEMON_IS_OLDER}\n"
    result = run("report")
    assert result.stderr == f"gpuyard: no such route: GET /report\n  {DAEMON_IS_OLDER}\n"


def test_an_answer_with_a_missing_key_names_both_versions(stand_in: StandIn) -> None:
    stand_in.answers["POST /pause"] = {"counts": {}}
    result = run("pause")
    assert result.returncode == 1
    assert result.stderr == (
        f"gpuyard: {DAEMON_IS_OLDER}\ngpuyard: the daemon's answer has no 'running'\n  {DAEMON_IS_OLDER}\n"
    )


def test_an_answer_of_another_version_behaves_like_a_plain_one() -> None:
    answer = {"jobs": [{"id": 1}], "next": None}
    read = with_missing_keys_explained(answer, OLD)
    assert read == answer
    assert json.dumps(read) == json.dumps(answer)
    assert read.get("more") is None
    with pytest.raises(EnvironmentFault, match="has no 'name'"):
        read["jobs"][0]["name"]


def test_a_daemon_without_a_status_is_not_restarted(stand_in: StandIn) -> None:
    del stand_in.answers["GET /status"]
    stand_in.answers["GET /jobs"] = page()
    assert run("queue").stderr == f"gpuyard: {DAEMON_IS_OLDER}\n"


# An older command


def test_an_older_command_asks_for_its_upgrade_and_never_restarts_a_newer_daemon(home: Path) -> None:
    assert run("daemon", "start").returncode == 0
    pid = pid_in(home)
    for arguments in (["queue"], ["submit", "--hold", "--", "true"]):
        result = subprocess.run(
            command_of(OLD, *arguments), capture_output=True, text=True, timeout=DEADLINE_S, check=True
        )
        assert result.stderr.startswith(
            f"gpuyard: the daemon is version {__version__}, this command is version {OLD} (in {sys.prefix}): upgrade it"
        )
        assert result.stderr.count("\n") == 1
        assert run("queue").stderr == ""
    refused = subprocess.run(
        command_of(OLD, "daemon", "restart"), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert refused.returncode == 2
    assert f"newer than this command ({OLD})" in refused.stderr
    assert pid_in(home) == pid


def test_versions_that_cannot_be_ordered_are_named_and_nothing_is_restarted(stand_in: StandIn) -> None:
    stand_in.version = "banana"
    stand_in.answers["GET /jobs"] = page()
    result = run("queue")
    assert result.stderr.startswith(f"gpuyard: the daemon is version banana, this command is version {__version__}: ")
    assert [each.route for each in stand_in.requests] == ["GET /jobs"]


# Scripts and screens


def test_a_script_gets_one_warning_in_its_log(stand_in: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    stand_in.answers["GET /jobs"] = page()
    with caplog.at_level(logging.WARNING, "gpuyard"), Client() as client:
        client.queue()
        client.queue()
    assert caplog.messages == [DAEMON_IS_OLDER]


def test_an_error_over_tcp_names_both_versions(home: Path, queue_at: QueueUnderTest) -> None:
    daemon = serving(OLD)
    url = queue_at.post("/web", port=0)["url"]
    with Client(url) as client:
        assert client.status().version == OLD
        with pytest.raises(NotThere, match="no job 99") as raised:
            client.show(99)
        assert DAEMON_IS_OLDER in str(raised.value.hint)
    assert pid_in(home) == daemon.pid
    assert daemon.kill(15) == 0


def test_top_names_both_versions_when_a_route_is_missing(stand_in: StandIn) -> None:
    async def ask() -> None:
        await DaemonStream(lambda _: None).ask("GET", "/tomorrow")

    with pytest.raises(NotThere) as raised:
        asyncio.run(ask())
    assert raised.value.hint == DAEMON_IS_OLDER


def test_the_web_port_hides_its_version_without_the_token(queue: QueueUnderTest) -> None:
    url = queue.post("/web", port=0)["url"].partition("?")[0]
    result = subprocess.run(
        [sys.executable, "-c", _ASK_PLAINLY, url], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert "401" in result.stdout
    assert "gpuyard-version" not in result.stdout.lower()
    assert __version__ not in result.stdout


_ASK_PLAINLY = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1].split("/")[2])
connection.request("GET", "/v1/status")
answer = connection.getresponse()
print(answer.status, answer.getheaders(), answer.read())
"""


# On the wire


@pytest.mark.parametrize(
    ("wanted", "status"),
    [(NEW, 412), (__version__, 200), (OLD, 200), ("banana", 200), ("9" * 5000, 200), ("", 200)],
)
def test_a_request_for_a_newer_daemon_is_refused_before_anything_is_done(
    own_home: Path, wanted: str, status: int
) -> None:
    done: list[Request] = []

    def note(request: Request) -> Response:
        done.append(request)
        return Response(body=b"{}")

    with served(own_home / "daemon.sock", note) as daemon:
        head = f"POST /v1/submissions HTTP/1.1\r\nHost: x\r\n{AT_LEAST_FIELD}: {wanted}\r\nConnection: close\r\n"
        # The daemon refuses before the body arrives: the rest of the body is never sent.
        length = "Content-Length: 5\r\n\r\n" if status == TOO_OLD else "Content-Length: 2\r\n\r\n{}"
        answer = daemon.exchange((head + length).encode())
    assert status_of(answer) == status
    assert f"{VERSION_FIELD}: {__version__}".encode() in answer
    assert len(done) == (0 if status == TOO_OLD else 1)
