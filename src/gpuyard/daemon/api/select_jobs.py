"""The jobs that a request selects: by ids and conditions as a user writes them, or by `where`.

Conditions are looked up in the reader's thread, so that a selection of 100,000 jobs delays no other request.
"""

import asyncio

from msgspec.structs import replace

from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.errors import UserError
from gpuyard.model.lifecycle import FINISHED, JobState
from gpuyard.model.selection import MOST_RANGES, JobSelection, merge_ranges, parse_selection, parse_state
from gpuyard.queue.selected_jobs import refuse_empty_range, refuse_no_match
from gpuyard.schema import requests
from gpuyard.store.search_jobs import JobFilter

# Ranges of ids that are looked up before other requests are served.
_RANGES_AT_ONCE = 200


class SelectionReader:
    def __init__(self, scheduler: SchedulerLoop, reader: ThreadedReader) -> None:
        self._selected = scheduler.requests.selected
        self._reader = reader

    async def find(self, text: str) -> list[tuple[int, int]]:
        """Return the ids as ranges; none if no job meets the conditions. UserError for ids that do not exist."""
        selection = parse_selection(text)
        if not selection.has_conditions:
            return self._selected.ranges(selection)
        located = self._selected.located(selection)
        return await self._reader.search(lambda search: search.selected_ranges(located))

    async def ranges(self, text: str) -> list[tuple[int, int]]:
        """Return the ids as ranges. UserError if no job matches."""
        found = await self.find(text)
        refuse_no_match(parse_selection(text), found)
        return found

    def repeatable(self, text: str, ranges: list[tuple[int, int]], ids: str) -> str:
        """Return what selects the same jobs in a later request: `ids`, the ranges, unless these are too many."""
        if len(ranges) <= MOST_RANGES:
            return ids
        if text and parse_selection(text).is_lasting:
            return text
        raise UserError(
            f"these jobs have {len(ranges):,} separate ranges of ids, which are too many to wait for",
            hint="select them by ids, tag= or name= alone",
        )

    def is_broad(self, body: requests.ChangeRequest) -> bool:
        """Return whether jobs are selected that the user has not named one by one, in whatever state they are."""
        if body.where is not None:
            return True
        if isinstance(body.ids, list) and all(isinstance(each, int) for each in body.ids):
            return False
        selection = parse_selection(_ids_text(body))
        return not selection.states and not selection.names_each_job

    async def count_finished(self, body: requests.ChangeRequest) -> dict[str, int]:
        """Return how many finished jobs are selected, by state."""
        ranges = [each for piece in await self.pieces(body) for each in piece.ranges]
        counts = await self._reader.search(lambda search: search.count_states(ranges))
        return {state: count for state, count in counts.items() if state in FINISHED}

    async def pieces(self, body: requests.ChangeRequest, only: tuple[JobState, ...] = ()) -> list[JobSelection]:
        """Return the selected jobs in pieces. Their states are checked again when they are changed."""
        if body.where is None:
            text = _ids_text(body)
            # A list of thousands of ids takes long to parse.
            is_long = len(text) > 8192
            selection = await asyncio.to_thread(parse_selection, text) if is_long else parse_selection(text)
            is_given = not selection.has_conditions and not selection.is_all
            if is_given and len(selection.ranges) <= _RANGES_AT_ONCE:
                return [replace(selection, states=only)]
            if is_given:  # all are named one by one, and a job has to be in each range
                refuse_empty_range(await self._reader.search(lambda search: search.empty_range(selection.ranges)))
                ranges = merge_ranges(selection.ranges)
            else:
                ranges = await self.ranges(text)
            states = selection.states
        else:
            if body.ids:
                raise UserError("ids and where do not go together", hint="give one of them")
            wanted = read_filter(body.where)
            if wanted.is_plain and not wanted.states:
                raise UserError("where matches every job", hint='send {"ids": "all"} to change all jobs')
            ranges, states = await self._reader.search(lambda search: search.ranges(wanted)), wanted.states
        return [
            JobSelection(ranges=tuple(ranges[first : first + _RANGES_AT_ONCE]), states=only or states)
            for first in range(0, len(ranges), _RANGES_AT_ONCE)
        ]


def read_filter(query: requests.JobMatch) -> JobFilter:
    """Return which jobs are wanted, without their ids."""
    return JobFilter(
        states=tuple(parse_state(word) for word in query.state.split(",") if word),
        search=query.search.strip()[:1000],
        tag=query.tag,
        user=query.user,
    )


def _ids_text(body: requests.ChangeRequest) -> str:
    ids = body.ids if isinstance(body.ids, list) else [] if body.ids is None else [body.ids]
    return " ".join(map(str, ids))
