"""Changes as they happen: whoever names what they want to know is told it again whenever it is no longer the same.

A viewer watches what can be asked with GET, such as `/status /jobs?state=queued`. However many watch the same, it is
worked out once, after a step of the queue, and no more often than twice a second; an error is an answer, too. While
anybody watches, the machine is looked at each second.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable

from gpuyard.control.step import Step
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.connection import Answer, failure
from gpuyard.daemon.server.http_parser import Request, ResponseStream, StreamClient
from gpuyard.daemon.server.watch_targets import as_request, named_in
from gpuyard.errors import UserError

_EVERY_S = 0.5
_LOOK_EVERY_S = 1.0
_HEARTBEAT_S = 15.0
_MOST_WATCHED = 16
_HEARTBEAT = b": still here\n\n"


class EventStreams:
    def __init__(self, scheduler: SchedulerLoop, handle: Callable[[Request], Answer | Awaitable[Answer]]) -> None:
        self._scheduler = scheduler
        self._handle = handle
        self._viewers: dict[str, set[StreamClient]] = {}
        self._told: dict[str, bytes] = {}
        self._asked: dict[str, asyncio.Future[None]] = {}
        self._due: asyncio.TimerHandle | None = None
        self._telling: asyncio.Task[None] | None = None
        self._last_at = 0.0
        self._pulse: asyncio.TimerHandle | None = None
        self._beats = 0
        scheduler.listeners.append(self._changed)

    @property
    def viewers(self) -> int:
        return len(self._all())

    def stream(self, request: Request) -> ResponseStream:
        watched = named_in(request)
        if not watched or len(watched) > _MOST_WATCHED:
            raise UserError("what is to be watched?", hint="name it as watch=/status /jobs?state=running")
        for target in watched:
            as_request(target)
        return ResponseStream(begin=lambda viewer: self._join(viewer, watched))

    def _join(self, viewer: StreamClient, watched: list[str]) -> Callable[[], None]:
        for target in watched:
            self._viewers.setdefault(target, set()).add(viewer)
            if target in self._told:
                viewer.send(self._told[target])
            else:
                self._ask(target)
        if self._pulse is None:
            self._beat()
        return lambda: self._leave(viewer, watched)

    def _leave(self, viewer: StreamClient, watched: list[str]) -> None:
        for target in watched:
            viewers = self._viewers.get(target, set())
            viewers.discard(viewer)
            if not viewers:
                self._viewers.pop(target, None)
                self._told.pop(target, None)
        if not self._viewers and self._pulse is not None:
            self._pulse.cancel()
            self._pulse = None

    def _changed(self, _: Step) -> None:
        if self._viewers and self._due is None:
            loop = asyncio.get_running_loop()
            self._due = loop.call_at(max(loop.time(), self._last_at + _EVERY_S), self._tell)

    def _tell(self) -> None:
        loop = asyncio.get_running_loop()
        if self._telling is not None and not self._telling.done():
            self._due = loop.call_later(_EVERY_S, self._tell)
            return
        self._due, self._last_at = None, loop.time()
        self._telling = loop.create_task(self._tell_each())

    async def _tell_each(self) -> None:
        """However many things are watched, others are served in between."""
        for target in list(self._viewers):
            if target in self._viewers:
                self._ask(target)
                await asyncio.sleep(0)

    def _ask(self, target: str) -> None:
        """Tells its viewers, now or when the answer is there."""
        if target in self._asked:
            return
        try:
            answer = self._handle(as_request(target))
        except Exception as error:  # noqa: BLE001 - as where requests are answered: the daemon lives on
            self._answer(target, failure(as_request(target), error))
            return
        if not isinstance(answer, Awaitable):
            self._answer(target, answer)
            return
        task = asyncio.ensure_future(self._await(target, answer))
        self._asked[target] = task
        task.add_done_callback(lambda _: self._asked.pop(target, None))

    async def _await(self, target: str, answer: Awaitable[Answer]) -> None:
        try:
            self._answer(target, await answer)
        except Exception as error:  # noqa: BLE001 - as above
            self._answer(target, failure(as_request(target), error))

    def _answer(self, target: str, answer: Answer) -> None:
        if isinstance(answer, ResponseStream):
            answer = failure(as_request(target), UserError(f"{target} cannot be watched"))
        told = b'data: {"watch": %b, "answer": %b}\n\n' % (json.dumps(target).encode(), answer.body)
        if told != self._told.get(target):
            if target in self._viewers:
                self._told[target] = told
            for viewer in list(self._viewers.get(target, ())):
                viewer.send(told)

    def _beat(self) -> None:
        self._beats += 1
        self._scheduler.sampling.request()
        if self._beats * _LOOK_EVERY_S % _HEARTBEAT_S == 0:
            for viewer in self._all():
                viewer.send(_HEARTBEAT)
        self._pulse = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._beat)

    def _all(self) -> set[StreamClient]:
        return {viewer for viewers in self._viewers.values() for viewer in viewers}
