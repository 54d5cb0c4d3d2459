"""Server-sent events: a client names the GET routes that it watches, and gets each answer again when it has changed.

A client watches targets such as `/status /jobs?state=queued`. Each target is evaluated once for all its clients: after
a step of the scheduler, at most twice a second. An error is sent as an answer, too. While a client is connected the
machine is sampled every second.
"""

import asyncio
import json
from collections.abc import Callable

from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.connection import Handler, HttpAnswer, answer_of
from gpuyard.daemon.server.http_messages import Request, ResponseStream, StreamClient, failure, target_request
from gpuyard.errors import UserError
from gpuyard.queue.step import Step

_EVERY_S = 0.5
HEARTBEAT_S = 15.0
HEARTBEAT = b": still here\n\n"


class EventStreams:
    def __init__(self, scheduler: SchedulerLoop, handle: Handler) -> None:
        self._scheduler, self._handle = scheduler, handle
        self._clients: dict[str, set[StreamClient]] = {}  # by target
        self._sent: dict[str, bytes] = {}  # the last event of each target
        self._awaited: dict[str, asyncio.Future[HttpAnswer]] = {}
        self._update_task: asyncio.Task[None] | None = None
        self._is_due, self._updated_at = False, 0.0
        self._beat_timer: asyncio.TimerHandle | None = None
        self._beats = 0
        scheduler.listeners.append(self._schedule_update)

    @property
    def viewers(self) -> set[StreamClient]:
        return set[StreamClient]().union(*self._clients.values())

    def stream(self, request: Request) -> ResponseStream:
        targets = request.query.get("watch", "").split()
        if not 1 <= len(targets) <= 16:
            message = f"1 to 16 targets can be watched at once, not {len(targets)}"
            raise UserError(message, hint="for example watch=/status /jobs?state=running")
        for target in targets:
            target_request(target)  # raises if it cannot be watched
        return ResponseStream(start=lambda client: self._add(client, targets))

    def _add(self, client: StreamClient, targets: list[str]) -> Callable[[], None]:
        for target in targets:
            self._clients.setdefault(target, set()).add(client)
            if target in self._sent:
                client.send(self._sent[target])
            else:
                self._update(target)
        if self._beat_timer is None:
            self._beat()
        return lambda: self._remove(client, targets)

    def _remove(self, client: StreamClient, targets: list[str]) -> None:
        for target in targets:
            clients = self._clients.get(target, set())
            clients.discard(client)
            if not clients:
                self._clients.pop(target, None)
                self._sent.pop(target, None)
        if not self._clients and self._beat_timer is not None:
            self._beat_timer.cancel()
            self._beat_timer = None

    def _schedule_update(self, _: Step) -> None:
        if self._clients and not self._is_due:
            self._is_due = True
            self._update_task = asyncio.get_running_loop().create_task(self._update_all())

    async def _update_all(self) -> None:
        """Evaluate all targets, half a second after the last time. Other requests are served between two of them."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._updated_at + _EVERY_S - loop.time())
        self._is_due, self._updated_at = False, loop.time()
        for target in list(self._clients):
            if target in self._clients:
                self._update(target)
                await asyncio.sleep(0)

    def _update(self, target: str) -> None:
        """Evaluate the target, unless that is under way, and send the answer when it is there."""
        if target in self._awaited:
            return
        request = target_request(target)

        def finish(future: asyncio.Future[HttpAnswer]) -> None:
            del self._awaited[target]
            if not future.cancelled():
                self._send(target, answer_of(request, future))

        self._awaited[target] = answer = asyncio.ensure_future(self._handle(request))
        answer.add_done_callback(finish)

    def _send(self, target: str, answer: HttpAnswer) -> None:
        """Send the answer to the clients of the target if it differs from the last one."""
        if isinstance(answer, ResponseStream):
            answer = failure(target_request(target), UserError(f"{target} cannot be watched"))
        event = b'data: {"watch": %b, "answer": %b}\n\n' % (json.dumps(target).encode(), answer.body)
        if event != self._sent.get(target):
            if target in self._clients:
                self._sent[target] = event
            for client in list(self._clients.get(target, ())):
                client.send(event)

    def _beat(self) -> None:
        self._beats += 1
        self._scheduler.sampling.request()
        if self._beats % HEARTBEAT_S == 0:
            for client in self.viewers:
                client.send(HEARTBEAT)
        self._beat_timer = asyncio.get_running_loop().call_later(1.0, self._beat)
