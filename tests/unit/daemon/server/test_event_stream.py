"""Event streams: viewers get changed responses only, and a large update does not delay other requests."""

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any, cast

from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.event_stream import EventStreams
from gpuyard.daemon.server.http_messages import Request, Response

WATCHED = 16


class Reader:
    """A viewer that keeps all messages, and sets an event after `enough` of them."""

    def __init__(self, enough: int) -> None:
        self.received: list[bytes] = []
        self.has_enough = asyncio.Event()
        self._enough = enough

    def send(self, data: bytes) -> None:
        self.received.append(data)
        if len(self.received) == self._enough:
            self.has_enough.set()

    def end(self) -> None:
        self.received.append(b"the end")


def test_other_requests_are_handled_while_a_large_update_is_sent_to_viewers() -> None:
    order: list[str] = []
    answers = itertools.count()

    async def handle(request: Request) -> Response:
        if (nth := next(answers)) == WATCHED:  # the first that is sent again
            asyncio.get_running_loop().call_soon(order.append, "another request")
        order.append(request.path)
        return Response(body=b"%d" % nth)

    async def watch() -> None:
        scheduler: Any = SimpleNamespace(listeners=[], sampling=SimpleNamespace(request=lambda: None))
        events, reader = EventStreams(cast("SchedulerLoop", scheduler), handle), Reader(2 * WATCHED)
        targets = " ".join(f"/jobs/{number}" for number in range(1, WATCHED + 1))
        leave = events.stream(Request(method="GET", path="/v1/events", query={"watch": targets})).start(reader)
        async with asyncio.timeout(30):
            while len(reader.received) < WATCHED:  # noqa: ASYNC110 - it follows from what the loop did
                await asyncio.sleep(0)
        order.clear()
        (changed,) = scheduler.listeners
        changed(None)
        async with asyncio.timeout(30):
            await reader.has_enough.wait()
        leave()

    asyncio.run(watch())
    assert sorted(order) == sorted([*(f"/v1/jobs/{number}" for number in range(1, WATCHED + 1)), "another request"])
    assert order.index("another request") <= 2


def test_a_viewer_gets_a_response_again_only_when_it_has_changed() -> None:
    answers = iter([b"1", b"1", b"2"])
    asked: asyncio.Queue[bytes]

    async def handle(_: Request) -> Response:
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
        return reader.received

    assert [json.loads(message.removeprefix(b"data: "))["answer"] for message in asyncio.run(watch())] == [1, 2]
