"""Many clients at once, some of them misbehaving: the others are served as usual."""

import contextlib
import random
import secrets
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import pytest

from gpuyard.client.fast_http import DaemonConnection, render_request
from gpuyard.errors import UserError
from tests.in_time import in_time
from tests.integration.queue_fixture import QueueUnderTest, submission, until
from tests.scale import size
from tests.unit.ledger import child, wait_for_message

pytestmark = pytest.mark.usefixtures("unmeasured")

CLIENTS, EACH = 50, 4
SILENT = 20
# Generous: the test measures that no client waits for the end of another client's large request.
SOON_S = 1.0


def submit_some(connection: Pipe, path: str) -> None:
    connection.send("ready")
    wait_for_message(connection)
    with DaemonConnection(path, may_start=False) as client:
        ids = [
            client.request("POST", "/submissions", body=submission("true", gpus=0, hold=True))["first"]
            for _ in range(EACH)
        ]
    connection.send(ids)


def test_jobs_of_fifty_simultaneous_clients_all_get_unique_ids(queue: QueueUnderTest) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(child(submit_some, str(queue.home / "daemon.sock"))) for _ in range(CLIENTS)]
        for one in clients:
            one.receive()
        for one in clients:
            one.send("go")
        ids = [job_id for one in clients for job_id in one.receive()]
    assert sorted(ids) == list(range(1, CLIENTS * EACH + 1))
    queue.restart()
    assert queue.counts() == {"held": CLIENTS * EACH}


@contextlib.contextmanager
def callers(path: Path, messages: list[bytes]) -> Iterator[list[socket.socket]]:
    """Open one connection per message, send the message, and yield the connections."""
    made: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for message in messages:
            caller = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            made.append(caller)
            caller.settimeout(0.0)
            with contextlib.suppress(BlockingIOError):
                caller.connect(str(path))
                caller.send(message)
        yield made


def is_open_and_silent(caller: socket.socket) -> bool:
    """Return whether the daemon has neither answered nor closed the connection."""
    try:
        caller.recv(1)
    except BlockingIOError:
        return True
    return False


def test_clients_that_are_silent_or_send_invalid_or_half_requests_delay_no_other_client(queue: QueueUnderTest) -> None:
    dice = random.Random(4)
    request = b"POST /v1/submissions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"
    messages = [
        *[b""] * SILENT,
        *[dice.randbytes(dice.randint(1, 2000)) for _ in range(20)],
        *[request[: dice.randint(1, len(request))] for _ in range(20)],
        b"GET /" + b"x" * 1_000_000,
        b"POST /v1/submissions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n",
        b"POST /v1/submissions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFF\r\n",
    ]
    with callers(queue.home / "daemon.sock", messages) as made:
        ids = [queue.submit("true", gpus=0)]
        queue.wait(ids[0])
        assert all(map(is_open_and_silent, made[:SILENT])), "a silent connection was closed before its timeout"

        def run_one() -> None:
            ids.append(queue.submit("true", gpus=0))
            queue.wait(ids[-1])

        for _ in range(19):
            in_time(5 * SOON_S, run_one)
    assert queue.counts() == {"succeeded": len(ids)}


def test_an_invalid_submission_is_rejected_and_stores_nothing(queue: QueueUnderTest) -> None:
    strange = {"cwd": "/", "environment": {}, "command": ["true"], "strange": 1}
    half: tuple[object, ...] = (
        submission(),
        submission("true", cwd="here"),
        submission("true", odd=1),
        {"environment": {}},
    )
    bodies: tuple[object, ...] = (None, [], {}, strange, *half)
    for body in bodies:
        with pytest.raises(UserError):
            queue.client.request("POST", "/submissions", body=body)
    assert queue.counts() == {}


def test_a_submission_without_a_directory_uses_the_home_and_the_daemons_environment(queue: QueueUnderTest) -> None:
    answer = queue.client.request("POST", "/submissions", body={"command": ["true"], "options": {"hold": True}})
    shown = queue.client.request("GET", f"/jobs/{answer['first']}", {"environment": "1"})
    assert shown["cwd"] == str(Path.home())
    assert shown["environment"]["GPUYARD_HOME"] == str(queue.home)


def test_a_repeated_submission_counts_once_even_after_a_daemon_restart(queue: QueueUnderTest) -> None:
    token = secrets.token_hex(8)
    first = queue.send("true", token=token, array="0-4", gpus=0)
    assert queue.send("true", token=token, array="0-4", gpus=0) == first
    queue.restart()
    assert queue.send("true", token=token, array="0-4", gpus=0)["ids"] == first["ids"]
    assert queue.wait()["succeeded"] == 5


def test_the_same_large_submission_from_two_clients_at_once_counts_once(queue: QueueUnderTest) -> None:
    body = submission("true", array="1-3000", gpus=0, hold=True)
    answers: list[str] = []

    def send() -> None:
        with DaemonConnection(str(queue.home / "daemon.sock"), may_start=False) as client:
            answers.append(client.request("POST", "/submissions", body=body)["ids"])

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["1-3000", "1-3000"]
    assert queue.counts() == {"held": 3000}


def test_other_clients_are_answered_while_thousands_of_jobs_are_submitted_and_cancelled(queue: QueueUnderTest) -> None:
    count = size(5_000, full=20_000)
    path = str(queue.home / "daemon.sock")
    for method, body, state in (
        ("/submissions", submission("true", array=f"1-{count}", gpus=0, hold=True), "held"),
        ("/jobs/cancel", {"ids": f"1-{count}"}, "cancelled"),
    ):
        done, counts_seen = threading.Event(), set[int]()

        def send(route: str = method, content: object = body, done: threading.Event = done) -> None:
            with DaemonConnection(path, may_start=False) as client:
                client.request("POST", route, body=content)
            done.set()

        thread = threading.Thread(target=send)
        thread.start()
        while not done.is_set():
            counts_seen.add(in_time(SOON_S, queue.counts).get(state, 0))
        thread.join()
        assert len(counts_seen - {0, count}) > 2, "several intermediate counts"
    assert queue.counts() == {"cancelled": count}


@contextlib.contextmanager
def send_without_reading(queue: QueueUnderTest, body: object) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.connect(str(queue.home / "daemon.sock"))
        caller.sendall(render_request("POST", "/submissions", None, body, {}))
        yield


def test_a_submission_completes_when_its_client_disconnects(queue: QueueUnderTest) -> None:
    body = submission("true", array="1-3000", gpus=0, hold=True)
    with send_without_reading(queue, body):
        until(queue.counts, "the first of its jobs")
    until(lambda: queue.counts() == {"held": 3000}, "all of them")
    assert queue.client.request("POST", "/submissions", body=body)["ids"] == "1-3000"


def test_a_large_submission_without_an_acknowledgement_is_rolled_back(queue: QueueUnderTest) -> None:
    body = submission("true", array="1-20000", gpus=0, hold=True)
    with send_without_reading(queue, body):
        until(queue.counts, "the first of its jobs")
        queue.kill9()
    queue.start()
    assert queue.counts() == {}
    assert queue.client.request("POST", "/submissions", body=body)["count"] == 20_000
    assert queue.counts() == {"held": 20_000}
