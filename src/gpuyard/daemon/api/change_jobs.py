"""Routes that change jobs: those with given ids, or all that match."""

from gpuyard.control.user_requests import Act
from gpuyard.core.job.selection import JobSelection, format_ids, parse_selection
from gpuyard.daemon.api.list_jobs import SAMPLE_FOR_PEOPLE_S, read_filter
from gpuyard.daemon.api.slow_requests import ThreadedReader, run_in_pieces
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.errors import UserError
from gpuyard.schema.queue import ChangeSummary, UnchangedJob
from gpuyard.schema.requests import ChangeRequest, PriorityRequest

# Ranges of ids that are looked up before other requests are served.
_RANGES_AT_ONCE = 200
_MOST_UNCHANGED = 100


class ChangeHandler:
    def __init__(self, scheduler: SchedulerLoop, reader: ThreadedReader) -> None:
        self._scheduler = scheduler
        self._reader = reader

    async def suspend(self, body: ChangeRequest) -> ChangeSummary:
        sample = await self._scheduler.sampling.fresh(SAMPLE_FOR_PEOPLE_S)
        return await self.change(lambda job, now: self._scheduler.requests.suspend(job, now, sample), body)

    async def prioritise(self, body: PriorityRequest) -> ChangeSummary:
        return await self.change(lambda job, now: self._scheduler.requests.prioritise(job, now, body.priority), body)

    async def change(self, act: Act, body: ChangeRequest) -> ChangeSummary:
        ids: list[int] = []
        unchanged: list[UnchangedJob] = []
        for selection in await self._selections(body):
            changed = await run_in_pieces(self._scheduler.requests.change(selection, act))
            ids += changed.ids
            unchanged += changed.unchanged
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
        return [
            JobSelection(ranges=ranges[first : first + _RANGES_AT_ONCE], states=wanted.states)
            for first in range(0, len(ranges), _RANGES_AT_ONCE)
        ]
