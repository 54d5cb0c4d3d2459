"""Asks the processes of a job that have registered for it to park their GPU memory, and to take it back: all of them,
or none, as `system/parking_protocol.py` says. Processes that wait for no other park at their own next point."""

import _socket
import contextlib
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from gpuyard.engines.local.attempt_processes import TrackedProcess
from gpuyard.errors import GpuyardError
from gpuyard.system import parking_protocol as protocol
from gpuyard.system import user_sockets
from gpuyard.system.parking_protocol import Registration


class NotDone(Exception):
    """Why the processes have not parked, or are not back."""


class RegisteredProcesses:
    def __init__(self, registrations: Sequence[Registration], parks_within_s: float) -> None:
        self._registrations = tuple(registrations)
        self._parks_within_s = parks_within_s
        self.refusal: str | None = None  # why the last `park` has moved nothing

    def __len__(self) -> int:
        return len(self._registrations)

    def park(self) -> int | None:
        """Return how many bytes of GPU memory they have moved to RAM; None if they have not, and go on as they were."""
        self.refusal = protocol.why_incomplete(self._registrations)
        if self.refusal is not None:
            return None
        try:
            with _Connections(self._parks_within_s) as connections:
                held = connections.ask(dict.fromkeys(self._registrations, protocol.HOLD), protocol.NEXT)
                points = agree_on_points({each: _number(text) for each, text in held.items()})
                requests = {each: b"%s %d" % (protocol.PARK, point) for each, point in points.items()}
                parked = connections.ask(requests, protocol.PARKED)
                parked_bytes = sum(map(_number, parked.values()))
                connections.keep()
                return parked_bytes
        except NotDone as error:
            self.refusal = str(error)
            self.bring_back()
            return None

    def bring_back(self) -> str | None:
        """Return why their memory is not back, or None if it is. If one cannot take it back, all stay parked."""
        try:
            with _Connections(120.0, may_end=True) as connections:
                connections.ask(dict.fromkeys(self._registrations, protocol.RETURN), protocol.RETURNED)
                connections.keep()
            return None
        except NotDone as error:
            return str(error)


def find_registered(
    queue: str, attempt: str, processes: Sequence[TrackedProcess], parks_within_s: float
) -> RegisteredProcesses | None:
    alive = {process.pid for process in processes}
    found = [each for each in protocol.registered(queue, attempt) if each.pid in alive]
    return RegisteredProcesses(found, parks_within_s) if found else None


def agree_on_points(following: Mapping[Registration, int]) -> dict[Registration, int]:
    """Return where each process shall park, given its next point. NotDone: they cannot have counted the same."""
    together = [point for each, point in following.items() if each.world_size > 1]
    first, last = min(together, default=0), max(together, default=0)
    if last - first > 4:  # processes in step with each other are one point apart, or a few with pipelines
        raise NotDone(f"its processes are {last - first} steps apart, so they do not count the same steps")
    return {each: last if each.world_size > 1 else point for each, point in following.items()}


class _Connections:
    """What is asked is undone when they are closed without `keep`. `may_end`: leave out processes that have ended."""

    def __init__(self, within_s: float, *, may_end: bool = False) -> None:
        self._within_s = within_s
        self._deadline = time.monotonic() + within_s
        self._may_end = may_end
        self._open: dict[Registration, _socket.socket] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._open.values():
            connection.close()

    def ask(self, requests: Mapping[Registration, bytes], expected: str) -> dict[Registration, str]:
        """Return what follows the expected word in each answer. NotDone: one answers otherwise, or not in time."""
        for each, request in requests.items():
            self._send(each, request)
        answers = {}
        for each, line in self._lines():
            word, _, answers[each] = line.partition(" ")
            if word != expected:
                raise NotDone(answers[each] or f"process {each.pid} gave an unknown answer")
        return answers

    def keep(self) -> None:
        for each in tuple(self._open):
            self._send(each, protocol.KEEP)

    def _send(self, each: Registration, request: bytes) -> None:
        try:
            if each not in self._open:
                self._open[each] = user_sockets.connect(each.path, self._within_s)
            self._open[each].send(request + b"\n")
        except OSError:
            self._drop(each)
        except GpuyardError as error:
            raise NotDone(str(error)) from None

    def _lines(self) -> Iterator[tuple[Registration, str]]:
        received = dict.fromkeys(self._open, b"")
        while received:
            numbers = {self._open[each].fileno(): each for each in received}
            poll = select.poll()
            for number in numbers:
                poll.register(number, select.POLLIN)
            ready = poll.poll(max(0.0, self._deadline - time.monotonic()) * 1000)
            if not ready:
                slow = ", ".join(str(each.pid) for each in received)
                raise NotDone(f"no end of a step within {self._within_s:g} s (process {slow})")
            for each in [numbers[number] for number, _ in ready]:
                part = self._receive(each)
                received[each] += part
                if not part:
                    del received[each]
                    self._drop(each)
                elif part.endswith(b"\n"):
                    yield each, received.pop(each).decode("utf-8", "replace").strip()

    def _receive(self, each: Registration) -> bytes:
        with contextlib.suppress(OSError):
            return self._open[each].recv(protocol.LONGEST_LINE)
        return b""

    def _drop(self, each: Registration) -> None:
        if not self._may_end:
            raise NotDone(f"process {each.pid} has ended")
        if each in self._open:
            self._open.pop(each).close()


def _number(text: str) -> int:
    if not text.isdecimal():
        raise NotDone(f"an unknown answer: {text[:80]}")
    return int(text)
