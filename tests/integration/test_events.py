"""Clients that watch the queue get changes as they happen, and delay no other client."""

import contextlib
import itertools
import json
import socket
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from gpuyard.system import user_sockets
from tests.integration.queue_fixture import DEADLINE_S, QueueUnderTest, until

pytestmark = pytest.mark.usefixtures("unmeasured")


class Watcher:
    """A reader of the daemon's event stream."""

    def __init__(self, queue: QueueUnderTest, *watched: str) -> None:
        self._link = socket.socket(socket.AF_UNIX)
        self._link.settimeout(DEADLINE_S)
        user_sockets.reach(str(queue.home / "daemon.sock"), self._link.connect)
        target = f"/v1/events?watch={quote(' '.join(watched))}"
        self._link.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        self._lines = self._read_lines()
        assert next(self._lines) == b"HTTP/1.1 200 OK"
        head = set(iter(lambda: next(self._lines), b""))
        assert b"Content-Type: text/event-stream" in head

    def _read_lines(self) -> Iterator[bytes]:
        unread = b""
        while news := self._link.recv(1 << 16):
            *lines, unread = (unread + news).split(b"\n")
            yield from (line.removesuffix(b"\r") for line in lines)

    def events(self) -> Iterator[tuple[str, Any]]:
        for line in self._lines:
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                yield event["watch"], event["answer"]

    def until(self, watched: str, condition: Any) -> Any:
        """Return the first answer that meets the condition."""
        return next(answer for what, answer in self.events() if what == watched and condition(answer))

    def close(self) -> None:
        self._link.close()


@contextlib.contextmanager
def watching(queue: QueueUnderTest, *watched: str) -> Iterator[Watcher]:
    watcher = Watcher(queue, *watched)
    try:
        yield watcher
    finally:
        watcher.close()


def test_a_watcher_sees_a_job_queued_running_and_ended(queue: QueueUnderTest) -> None:
    with watching(queue, "/status", "/jobs?all=1") as watcher:
        assert watcher.until("/status", lambda _: True)["counts"]["queued"] == 0
        job_id, gate = queue.start_gated()
        seen = watcher.until("/jobs?all=1", lambda page: any(job["state"] == "running" for job in page["jobs"]))
        assert [job["id"] for job in seen["jobs"]] == [job_id]
        gate.write_text("go\n")
        assert watcher.until("/status", lambda status: status["counts"]["succeeded"] == 1)


def test_a_slow_answer_can_be_watched_too(queue: QueueUnderTest) -> None:
    queue.post("/pause")
    job_id = queue.submit("true")
    with watching(queue, f"/jobs/{job_id}/why") as watcher:
        assert "paused" in watcher.until(f"/jobs/{job_id}/why", lambda _: True)["reasons"][0]["text"]
        queue.post("/unpause")
        assert watcher.until(f"/jobs/{job_id}/why", lambda why: why["state"] == "succeeded")


def test_a_missing_job_is_reported_and_watched_until_it_exists(queue: QueueUnderTest) -> None:
    with watching(queue, "/jobs/1", "/nothing") as watcher:
        first = dict(itertools.islice(watcher.events(), 2))  # in any order
        assert "no job 1" in first["/jobs/1"]["error"]
        assert "there is no GET /v1/nothing" in first["/nothing"]["error"]
        queue.submit("true")
        assert watcher.until("/jobs/1", lambda job: "state" in job)


@pytest.mark.parametrize("watched", ["", "jobs", "/events", " ".join(["/status"] * 17)])
def test_a_path_that_cannot_be_watched_is_refused(queue: QueueUnderTest, watched: str) -> None:
    with pytest.raises(Exception, match="watched"):
        queue.get("/events", watch=watched)


def test_a_viewer_that_stops_reading_is_dropped_and_the_others_continue(queue: QueueUnderTest) -> None:
    """Unread data is bounded: the viewer is dropped as soon as it exceeds the limit."""
    queue.submit("true", array="1-400", hold=True)
    priorities = itertools.count(1)

    def is_alone() -> bool:
        """Each change is another page that the viewer does not read."""
        queue.post("/jobs/priority", ids="1", priority=next(priorities))
        return bool(queue.get("/status")["viewers"] == 1)

    with watching(queue, "/jobs?limit=400"), watching(queue, "/status") as awake:
        assert queue.get("/status")["viewers"] == 2
        until(is_alone, "the end of the viewer that sleeps")
        queue.post("/pause")
        assert awake.until("/status", lambda status: status["paused"])
    until(lambda: queue.get("/status")["viewers"] == 0, "the end of the other one")


def test_a_listener_that_raises_affects_neither_the_queue_nor_other_viewers(own_queue: QueueUnderTest) -> None:
    broken = (
        "import sys; from gpuyard.daemon import main; from gpuyard.daemon.monitor import usage_history; "
        "usage_history.UsageHistory._after_step = lambda *_: 1 / 0; sys.exit(main.run_daemon())"
    )
    own_queue.start((sys.executable, "-c", broken))
    with watching(own_queue, "/status") as watcher:
        own_queue.submit("true")
        assert watcher.until("/status", lambda status: status["counts"]["succeeded"] == 1)
    assert own_queue.daemon is not None
    assert "a listener failed after a step" in own_queue.daemon.log
