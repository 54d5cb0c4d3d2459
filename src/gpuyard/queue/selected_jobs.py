"""SelectedJobs: which jobs a selection of a user means. `since=` is a time of day of this machine."""

from collections.abc import Iterator
from datetime import datetime

from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.selection import JobSelection, describe_conditions, last_moment, parse_moment
from gpuyard.ports import Clock
from gpuyard.store.queue_queries import QueueQueries


class SelectedJobs:
    def __init__(self, queries: QueueQueries, clock: Clock) -> None:
        self._queries = queries
        self._clock = clock

    def located(self, selection: JobSelection) -> JobSelection:
        """Return the selection with the queue time of its `since`. Raises UserError if no job can be meant."""
        if selection.is_empty:
            raise UserError(
                "no job is given", hint="give an id such as 17, a range such as 17-20, state=failed, tag=night or all"
            )
        refuse_empty_range(self._queries.empty_range(selection.ranges) if selection.ranges else None)
        if not selection.since:
            return selection
        return replace(selection, since_at=self._clock.from_wall(self._wall_time(selection.since)))

    def ranges(self, selection: JobSelection) -> list[tuple[int, int]]:
        """Return the selected job ids as ranges. Raises UserError for ids that do not exist, and if none matches."""
        found = self._queries.ranges(self.located(selection))
        refuse_no_match(selection, found)
        return found

    def ids(self, selection: JobSelection) -> Iterator[int]:
        for first, last in self.ranges(selection):
            yield from self._queries.ids(first, last)

    def _wall_time(self, since: str) -> float:
        try:
            now = datetime.fromtimestamp(self._clock.to_wall(self._clock.now()))  # noqa: DTZ006 - local time
            return last_moment(parse_moment(since), now).timestamp()
        except (ValueError, OverflowError, OSError):  # years that this system's clock does not know
            raise UserError(f"since={since} is out of range", hint="write it as since=22:00 or since=2d") from None


def refuse_no_match(selection: JobSelection, found: list[tuple[int, int]]) -> None:
    if not found and not (selection.is_all and not selection.has_conditions):
        among = " among these ids" if selection.ranges else ""
        raise _not_found(f"no job matches {describe_conditions(selection)}{among}")


def refuse_empty_range(ids: tuple[int, int] | None) -> None:
    if ids is not None:
        first, last = ids
        raise _not_found(f"there is no {f'job {first}' if first == last else f'job in {first}-{last}'}")


def _not_found(problem: str) -> UserError:
    return UserError(problem, hint="`gpuyard queue --all` lists all jobs", code="not_found")
