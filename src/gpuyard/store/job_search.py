"""Search: which jobs are meant, and a page of them in their order, however many there are.

It reads over a connection of its own, from a thread of its own. Nearly all of it is SQL, in which Python's lock is let
go: what takes SQLite a while holds up nobody. The order of those that wait in several lanes is not for SQL to find; it
is found once for many pages, and kept in a table of this connection's own.
"""

import contextlib
import json
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from gpuyard.core.job.lifecycle import FINISHED, JobState
from gpuyard.core.scheduling.queue_order import Candidate, LaneQueue, Party, whole_order
from gpuyard.store.database import Database
from gpuyard.store.job_store import JobStore

LIVE_IN_ORDER = (
    JobState.RUNNING, JobState.RESUMING, JobState.STOPPING, JobState.PENDING, JobState.SUSPENDING, JobState.SUSPENDED,
)  # fmt: skip
APART = (JobState.HELD, JobState.DELAYED, JobState.BLOCKED)
RECENTLY_FINISHED = 10
# Levels rise with time, so an order is kept for so long; one that took long is kept a few times as long in any case.
_SAME_S, _LONG_S, _RESTS = 5.0, 0.05, 4.0
_PIECE, _PAUSE_S = 200, 0.0005

# A job's words are its own, or those of its spec with its index and its values filled in.
_SAID = r"""(
    name LIKE :part ESCAPE '\' OR tag LIKE :part ESCAPE '\' OR jobs.id = :id OR CASE
        WHEN details LIKE '{{"command"%' THEN {own} LIKE :written ESCAPE '\' OR {own} LIKE :written_bare ESCAPE '\'
        WHEN (details IS NOT NULL OR array_index IS NOT NULL) AND spec IN (SELECT spec FROM templates)
            THEN {filled} LIKE :part ESCAPE '\' OR {filled} LIKE :bare ESCAPE '\'
        ELSE spec IN (SELECT id FROM specs WHERE command LIKE :part ESCAPE '\' OR command LIKE :bare ESCAPE '\')
    END
)"""
_OWN = """replace(trim(json_extract(details, '$.command'), '[]'), '","', ' ')"""
_TEMPLATES = "templates (spec, text) AS MATERIALIZED (SELECT id, command FROM specs WHERE instr(command, '{'))"
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)
# SQLite's expressions are only so deep; who has more names than that finds jobs by what is around them.
_MOST_NAMES = 50
_ARRIVED = (
    "lane NOT IN (SELECT id FROM lanes WHERE json_extract(body, '$.batch') IN "
    "(SELECT id FROM submissions WHERE NOT is_complete))"
)
_IN_RANGES = (
    "jobs.id IN (SELECT meant.id FROM json_each(:ranges) CROSS JOIN jobs AS meant "
    "ON meant.id BETWEEN json_extract(value, '$[0]') AND json_extract(value, '$[1]'))"
)
_PLACES = " ".join(f"WHEN '{state}' THEN {place}" for place, state in enumerate((*LIVE_IN_ORDER, "queued", *APART)))
_LISTED = (
    f"ORDER BY CASE state {_PLACES} ELSE 100 END, {{}}"
    "CASE WHEN jobs.ended_at IS NULL THEN jobs.id END, jobs.ended_at DESC, jobs.id DESC"
)


class JobFilter(Struct, frozen=True, kw_only=True):
    """Which jobs are asked for: in these states, with `search` in their name, tag or command, or as their id, and
    with that tag and user; `ranges` are of ids. `None` and nothing stand for any."""

    states: tuple[JobState, ...] = ()
    search: str = ""
    tag: str = ""
    user: str = ""
    ranges: tuple[tuple[int, int], ...] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to look for but states."""
        return not (self.search or self.tag or self.user or self.ranges is not None)


class PageRange(Struct, frozen=True, kw_only=True):
    """Where a page begins, and how long it is."""

    offset: int
    count: int


class Section(NamedTuple):
    """A part of a list: how many there are, and the ids from one place on, so many."""

    size: int
    ids: Callable[[int, int], list[int]]


class SearchResult(Struct, frozen=True, kw_only=True):
    """The ids of a page, and how many there are in all."""

    ids: list[int]
    total: int


class Search:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._execute = connection.execute
        self._line = _WaitingOrder(connection)

    def page(
        self, wanted: JobFilter, used: Mapping[Party, float], now: float, place: PageRange, *, show_all: bool
    ) -> SearchResult:
        """In the order in which they are listed: what runs, what waits in its order, the rest, the last finished."""
        with self._at_one_moment():
            if wanted.ranges is not None:
                return self._matching(wanted, place, "", "ORDER BY jobs.id")
            has_queued = not wanted.states or JobState.QUEUED in wanted.states
            if has_queued:
                self._line.look(JobStore(Database(self._connection)).ready_queues(), used, now)
            if wanted.is_plain:
                return _cut(list(self._sections(wanted, show_all=show_all)), place)
            if not has_queued or self._line.is_single:
                return self._matching(wanted, place, "", _LISTED.format(""))
            # Of those that have started since, the line still tells a place.
            order = _LISTED.format("CASE WHEN state = 'queued' THEN line.place END, ")
            return self._matching(wanted, place, "LEFT JOIN line USING (id)", order)

    def newest(self, wanted: JobFilter, place: PageRange) -> SearchResult:
        """The last that was submitted first."""
        with self._at_one_moment():
            if not wanted.is_plain:
                return self._matching(wanted, place, "", "ORDER BY jobs.id DESC")
            states = wanted.states or tuple(JobState)
            return _cut([self._section(f"jobs WHERE {_among(states)} ORDER BY id DESC", states)], place)

    def ranges(self, wanted: JobFilter) -> list[tuple[int, int]]:
        """All that match, as first and last of each stretch."""
        with self._at_one_moment():
            where, values = self._where(wanted)
            query = (
                f"WITH {_TEMPLATES} SELECT min(id), max(id) FROM (SELECT jobs.id, "  # noqa: S608
                f"jobs.id - row_number() OVER (ORDER BY jobs.id) AS island FROM jobs WHERE {where}) "
                "GROUP BY island ORDER BY 1"
            )
            return [(first, last) for first, last in self._execute(query, values)]

    @contextlib.contextmanager
    def _at_one_moment(self) -> Iterator[None]:
        self._execute("BEGIN")
        try:
            yield
        finally:
            self._execute("COMMIT")

    # Where something is looked for

    def _matching(self, wanted: JobFilter, place: PageRange, joined: str, order: str) -> SearchResult:
        where, values = self._where(wanted)
        values |= {"count": place.count, "offset": place.offset}
        chosen = f"FROM jobs {joined} WHERE {where}"
        query = f"WITH {_TEMPLATES} SELECT jobs.id, count(*) OVER () {chosen} {order} LIMIT :count OFFSET :offset"
        rows = self._execute(query, values).fetchall()
        if not rows and place.offset:
            query = f"WITH {_TEMPLATES} SELECT count(*) {chosen}"
            return SearchResult(ids=[], total=self._execute(query, values).fetchone()[0])
        return SearchResult(ids=[job_id for job_id, _ in rows], total=rows[0][1] if rows else 0)

    def _where(self, wanted: JobFilter) -> tuple[str, dict[str, object]]:
        clauses = [_among(wanted.states)] if wanted.states else []
        values: dict[str, object] = {}
        if wanted.ranges is None:
            clauses.append(_ARRIVED)
        else:
            clauses.append(_IN_RANGES)
            values["ranges"] = json.dumps(wanted.ranges)
        for column, value in (("tag", wanted.tag), ("user", wanted.user)):
            if value:
                clauses.append(f"jobs.{column} = :{column} AND jobs.{column} <> ''")
                values[column] = value
        if wanted.search:
            clauses.append(_SAID.format(own=_OWN, filled=self._filled()))
            values |= _needles(wanted.search)
        return " AND ".join(clauses), values

    def _filled(self) -> str:
        """A template's text with a job's own values in it."""
        rows = self._execute("SELECT CAST(command AS BLOB) FROM specs WHERE instr(command, '{')")
        names = {name for (text,) in rows for name in _PLACEHOLDER.findall(text.decode(errors="replace"))}
        filled = "(SELECT text FROM templates WHERE templates.spec = jobs.spec)"
        for name in sorted(names - {"index"})[:_MOST_NAMES]:
            value = f"""coalesce(json_extract(details, '$.values."{name}"'), '{{{name}}}')"""
            filled = f"replace({filled}, '{{{name}}}', {value})"
        index = """coalesce(array_index, json_extract(details, '$.values."index"'), '{index}')"""
        return f"replace({filled}, '{{index}}', {index})"

    # Where all of some states are listed

    def _sections(self, wanted: JobFilter, *, show_all: bool) -> Iterator[Section]:
        states = wanted.states or tuple(JobState)
        for state in LIVE_IN_ORDER:
            yield self._apart([state] if state in states else [])
        if JobState.QUEUED in states:
            yield self._line.section()
        yield self._apart([state for state in APART if state in states])
        finished = [state for state in states if state in FINISHED]
        source = f"jobs INDEXED BY jobs_finished WHERE ended_at IS NOT NULL AND {_among(finished)}"
        section = self._section(f"{source} ORDER BY ended_at DESC, id DESC", finished)
        most = section.size if show_all or wanted.states else RECENTLY_FINISHED
        yield section._replace(size=min(most, section.size))

    def _apart(self, states: Sequence[JobState]) -> Section:
        source = f"jobs INDEXED BY jobs_apart WHERE ended_at IS NULL AND state <> 'queued' AND {_among(states)}"
        return self._section(f"{source} ORDER BY state DESC, id", states)

    def _section(self, source: str, states: Sequence[JobState]) -> Section:
        query = f"SELECT id FROM {source} LIMIT ? OFFSET ?"  # noqa: S608
        counts = dict(self._execute("SELECT state, jobs FROM counts").fetchall())
        size = sum(counts[state] for state in states)
        return Section(size, lambda offset, count: [row[0] for row in self._execute(query, (count, offset))])


class _WaitingOrder:
    """Those that wait, in their order: while nothing changes it stays as it was, for a while."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute
        self._insert = connection.executemany
        self._queues: Sequence[LaneQueue] = ()
        self._version: int | None = None
        self._found_at = self._took_s = 0.0
        self._execute("PRAGMA temp_store = MEMORY")
        self._execute("CREATE TEMP TABLE line (id INTEGER PRIMARY KEY, place INTEGER NOT NULL UNIQUE)")

    def look(self, queues: Sequence[LaneQueue], used: Mapping[Party, float], now: float) -> None:
        self._queues = queues
        version = self._execute("PRAGMA data_version").fetchone()[0]
        age = time.monotonic() - self._found_at
        is_same = version == self._version and age < _SAME_S
        if self.is_single or is_same or (self._took_s > _LONG_S and age < _RESTS * self._took_s):
            return
        self._version, began = None, time.monotonic()
        self._execute("DELETE FROM line")
        self._insert("INSERT INTO line VALUES (?, ?)", _with_pauses(whole_order(queues, used, now)))
        self._version, self._found_at = version, time.monotonic()
        self._took_s = self._found_at - began

    @property
    def is_single(self) -> bool:
        """Whether there is one lane at most, whose jobs are in the order of their ids."""
        return len(self._queues) <= 1

    def section(self) -> Section:
        query = "SELECT count(*) FROM jobs WHERE state = 'queued' AND lane = ?"
        size = sum(self._execute(query, (queue.lane.id,)).fetchone()[0] for queue in self._queues)
        return Section(size, self._in_one if self.is_single else self._in_several)

    def _in_one(self, offset: int, count: int) -> list[int]:
        query = "SELECT id FROM jobs WHERE state = 'queued' AND lane = ? ORDER BY id LIMIT ? OFFSET ?"
        return [row[0] for row in self._execute(query, (self._queues[0].lane.id, count, offset))]

    def _in_several(self, offset: int, count: int) -> list[int]:
        query = "SELECT id FROM line WHERE place >= ? ORDER BY place LIMIT ?"
        return [row[0] for row in self._execute(query, (offset, count))]


def _with_pauses(candidates: Iterator[Candidate]) -> Iterator[tuple[int, int]]:
    """Python's lock goes to whoever waits for it only after 5 ms, unless the one who has it rests."""
    for place, candidate in enumerate(candidates):
        if place % _PIECE == _PIECE - 1:
            time.sleep(_PAUSE_S)
        yield candidate.job_id, place


def _cut(sections: Sequence[Section], place: PageRange) -> SearchResult:
    ids: list[int] = []
    begins = 0
    for section in sections:
        first, last = max(place.offset, begins), min(place.offset + place.count, begins + section.size)
        if first < last:
            ids += section.ids(first - begins, last - first)
        begins += section.size
    return SearchResult(ids=ids, total=begins)


def _among(states: Sequence[JobState]) -> str:
    return f"state IN ({', '.join(repr(str(state)) for state in states)})"


def _needles(search: str) -> dict[str, object]:
    """What is looked for. Commands are shown with quotes around some words, which are not theirs; a job's own command
    stands in JSON."""
    bare = search.replace("'", "")
    needles = {
        "part": search,
        "bare": bare,
        "written": json.dumps(search)[1:-1],
        "written_bare": json.dumps(bare)[1:-1],
    }
    is_id = search.isascii() and search.isdecimal() and len(search) < 19
    return {**{name: _like(text) for name, text in needles.items()}, "id": int(search) if is_id else None}


def _like(text: str) -> str:
    """As a part of what is looked at; what was typed stands for itself."""
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"
