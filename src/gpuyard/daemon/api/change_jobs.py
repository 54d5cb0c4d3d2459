"""Changes to jobs that are there: of those with these ids, or of all that match."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from gpuyard.control.user_requests import ChangeResult, InPieces
from gpuyard.core.job.selection import JobSelection, format_ids
from gpuyard.daemon.api.list_jobs import LOOK_FOR_PEOPLE_S, read_wanted
from gpuyard.daemon.api.parameters import read_body, read_priority, read_selection
from gpuyard.daemon.api.read_in_thread import ThreadedReader
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.chunked_work import run_in_pieces
from gpuyard.daemon.server.http_parser import Request
from gpuyard.daemon.server.router import Answer, Route, Routes
from gpuyard.errors import UserError
from gpuyard.store.job_search import JobFilter

# As many are looked up without others being served.
_RANGES = 200
_KEYS = ("state", "search", "tag", "user")

Act = Callable[[JobSelection], InPieces[ChangeResult]]


class ChangeHandler:
    def __init__(self, scheduler: SchedulerLoop, reader: ThreadedReader) -> None:
        self._scheduler = scheduler
        self._reader = reader

    def routes(self) -> Routes:
        requests = self._scheduler.requests
        return {
            ("POST", "/jobs/cancel"): self._route(requests.cancel),
            ("POST", "/jobs/hold"): self._route(requests.hold),
            ("POST", "/jobs/release"): self._route(requests.release),
            ("POST", "/jobs/retry"): self._route(requests.retry),
            ("POST", "/jobs/suspend"): self._suspend,
            ("POST", "/jobs/resume"): self._route(requests.resume),
            ("POST", "/jobs/priority"): self._priority,
        }

    def _route(self, act: Act) -> Route:
        return lambda request: self._do(read_body(request), act)

    async def _suspend(self, request: Request) -> Answer:
        body = read_body(request)
        look = await self._scheduler.sampling.fresh(LOOK_FOR_PEOPLE_S)
        return await self._do(body, lambda selection: self._scheduler.requests.suspend(selection, look))

    def _priority(self, request: Request) -> Awaitable[Answer]:
        body = read_body(request)
        priority = read_priority(body)
        return self._do(body, lambda selection: self._scheduler.requests.prioritise(selection, priority))

    async def _do(self, body: dict[str, Any], act: Act) -> Answer:
        ids: list[int] = []
        unchanged: list[Any] = []
        for selection in await self._selections(body):
            changed = await run_in_pieces(act(selection))
            ids += changed.ids
            unchanged += changed.unchanged
        self._scheduler.finish_signal.tell()
        self._scheduler.wake()
        return {
            "changed": format_ids(ids),
            "count": len(ids),
            "unchanged": [msgspec.to_builtins(refused) for refused in unchanged[:100]],
            "unchanged_count": len(unchanged),
        }

    async def _selections(self, body: dict[str, Any]) -> list[JobSelection]:
        if "where" not in body:
            return [read_selection(body.get("ids"))]
        wanted = _read_where(body)
        ranges = await self._reader.search(lambda search: search.ranges(wanted))
        # The states are looked at again: what waited when it was found may run by now, and is not meant.
        return [JobSelection(ranges=piece, states=wanted.states) for piece in _pieces(tuple(ranges))]


def _read_where(body: dict[str, Any]) -> JobFilter:
    where = body["where"]
    if body.get("ids") or not isinstance(where, dict) or not set(where) <= set(_KEYS):
        raise UserError("which jobs are meant?", hint=f"say ids, or where with some of {', '.join(_KEYS)}")
    wanted = read_wanted({name: str(value) for name, value in where.items() if value})
    if wanted.is_plain and not wanted.states:
        raise UserError("where leaves nothing out", hint='say {"ids": "all"} if all are meant')
    return wanted


def _pieces(ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    for first in range(0, len(ranges), _RANGES):
        yield ranges[first : first + _RANGES]
