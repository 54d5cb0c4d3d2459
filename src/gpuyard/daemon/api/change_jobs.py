"""Routes that change jobs: those with given ids, or all that match."""

from collections.abc import Awaitable, Callable, Iterator

from gpuyard.control.user_requests import ChangeResult, InPieces
from gpuyard.core.job.selection import JobSelection, format_ids, parse_selection
from gpuyard.daemon.api.codec import decode_body
from gpuyard.daemon.api.list_jobs import SAMPLE_FOR_PEOPLE_S, read_filter
from gpuyard.daemon.api.read_in_thread import ThreadedReader
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.chunked_work import run_in_pieces
from gpuyard.daemon.server.http_parser import Request
from gpuyard.daemon.server.router import Route, Routes
from gpuyard.errors import UserError
from gpuyard.schema.queue import ChangeSummary, UnchangedJob
from gpuyard.schema.requests import ChangeRequest, PriorityRequest

# Ranges of ids that are looked up before other requests are served.
_RANGES_AT_ONCE = 200
_MOST_UNCHANGED = 100

Change = Callable[[JobSelection], InPieces[ChangeResult]]


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
            ("POST", "/jobs/priority"): self._prioritise,
        }

    def _route(self, change: Change) -> Route:
        return lambda request: self._change(decode_body(request, ChangeRequest), change)

    async def _suspend(self, request: Request) -> ChangeSummary:
        body = decode_body(request, ChangeRequest)
        sample = await self._scheduler.sampling.fresh(SAMPLE_FOR_PEOPLE_S)
        return await self._change(body, lambda selection: self._scheduler.requests.suspend(selection, sample))

    def _prioritise(self, request: Request) -> Awaitable[ChangeSummary]:
        body = decode_body(request, PriorityRequest)
        return self._change(body, lambda selection: self._scheduler.requests.prioritise(selection, body.priority))

    async def _change(self, body: ChangeRequest, change: Change) -> ChangeSummary:
        ids: list[int] = []
        unchanged: list[UnchangedJob] = []
        for selection in await self._selections(body):
            changed = await run_in_pieces(change(selection))
            ids += changed.ids
            unchanged += [UnchangedJob(id=each.id, reason=each.reason) for each in changed.unchanged]
        self._scheduler.finish_signal.tell()
        self._scheduler.wake()
        return ChangeSummary(
            changed=format_ids(ids),
            count=len(ids),
            unchanged=unchanged[:_MOST_UNCHANGED],
            unchanged_count=len(unchanged),
        )

    async def _selections(self, body: ChangeRequest) -> list[JobSelection]:
        if body.where is None:
            ids = body.ids if isinstance(body.ids, list) else [] if body.ids is None else [body.ids]
            return [parse_selection(" ".join(map(str, ids)))]
        if body.ids:
            raise UserError("ids and where do not go together", hint="give one of them")
        wanted = read_filter(body.where)
        if wanted.is_plain and not wanted.states:
            raise UserError("where matches every job", hint='send {"ids": "all"} to change all jobs')
        ranges = tuple(await self._reader.search(lambda search: search.ranges(wanted)))
        # States are checked again when the change is made: a job may have changed state since it was found.
        return [JobSelection(ranges=some, states=wanted.states) for some in _split(ranges)]


def _split(ranges: tuple[tuple[int, int], ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    for first in range(0, len(ranges), _RANGES_AT_ONCE):
        yield ranges[first : first + _RANGES_AT_ONCE]
