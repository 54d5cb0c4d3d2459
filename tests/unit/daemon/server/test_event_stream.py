"""What viewers are sent: what has changed, and never so much at once that others have to wait."""

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any, cast

from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.event_stream import EventStreams
from gpuyard.daemon.server.http_parser import Request, Response

WATCHED = 16


class Reader:
    """A viewer that hears all, and says when it has heard so much."""

    def __init__(self, enough: int) -> None:
        self.heard: list[bytes] = []
        self.has_enough = asyncio.Event()
        self._enough = enough

    def send(self, data: bytes) -> None:
        self.heard.append(data)
        if len(self.heard) == self._enough:
            self.has_enough.set()

    def end(self) -> None:
        self.heard.append(b"the end")


def test_while_viewers_are_told_of_much_others_are_served_in_between() -> None:
    order: list[str] = []
    answers = itertools.count()

    def handle(request: Request) -> Response:
        if (nth := next(answers)) == WATCHED:  # the first that is told again
            asyncio.get_running_loop().call_soon(order.append, "somebody else")
        order.append(request.path)
        return Response(body=b"%d" % nth)

    async def watch() -> None:
        scheduler: Any = SimpleNamespace(listeners=[], sampling=SimpleNamespace(request=lambda: None))
        events, reader = EventStreams(cast("SchedulerLoop", scheduler), handle), Reader(2 * WATCHED)
        targets = " ".join(f"/jobs/{number}" for number in range(1, WATCHED + 1))
        leave = events.stream(Request(method="GET", path="/v1/events", query={"watch": targets})).start(reader)
        assert len(reader.heard) == WATCHED
        order.clear()
        (changed,) = scheduler.listeners
        changed(None)
        async with asyncio.timeout(30):
            await reader.has_enough.wait()
        leave()

    asyncio.run(watch())
    assert sorted(order) == sorted([*(f"/v1/jobs/{number}" for number in range(1, WATCHED + 1)), "somebody else"])
    assert order.index("somebody else") <= 2


def test_a_viewer_is_sent_an_answer_again_only_when_it_has_changed() -> None:
    answers = iter([b"1", b"1", b"2"])
    asked: asyncio.Queue[bytes]

    def handle(_: Request) -> Response:
        body = next(answers)
        asked.put_nowait(body)
        return Response(body=body)

    async def watch() -> list[bytes]:
        nonlocal asked
        asked = asyncio.Queue()
        scheduler: Any = SimpleNamespace(listeners=[], sampling=SimpleNamespace(request=lambda: None))
        events, reader = EventStreams(cast("SchedulerLoop", scheduler), handle), Reader(2)
        leave = events.stream(Request(method="GET", path="/v1/events", query={"watch": "/status"})).start(reader)
        (changed,) = scheduler.listeners
        async with asyncio.timeout(30):
            assert await asked.get() == b"1"
            for body in (b"1", b"2"):
                changed(None)
                assert await asked.get() == body
            await reader.has_enough.wait()
        leave()
        return reader.heard

    assert [json.loads(told.removeprefix(b"data: "))["answer"] for told in asyncio.run(watch())] == [1, 2]
