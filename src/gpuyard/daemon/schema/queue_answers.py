"""The queue as a whole, what was submitted, what was changed."""

from typing import Annotated, NotRequired, TypedDict

from msgspec import Meta

from gpuyard.core.job.job import OutcomeKind
from gpuyard.core.job.lifecycle import JobState

Iso = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Counts = dict[str, int]


class Error(TypedDict):
    """What went wrong, and what to try."""

    error: str
    hint: str | None


class Standing(TypedDict):
    paused: bool
    draining: bool
    counts: Counts


class Status(Standing):
    pid: int
    version: str
    managed: bool
    started_at: Iso
    uptime_s: float
    socket: str
    state_dir: str
    under_way: int
    viewers: int
    step_us: float | None
    notices: list[str]


class Brakes(Standing):
    running: int


class Stopping(TypedDict):
    stopping: bool
    running: int


class Submitted(TypedDict):
    ids: str
    first: int
    last: int
    count: int
    notes: list[str]


class Unchanged(TypedDict):
    id: int
    reason: str


class Changed(TypedDict):
    changed: str
    count: int
    unchanged: list[Unchanged]
    unchanged_count: int


class Unsuccessful(TypedDict):
    id: int
    state: JobState
    outcome: OutcomeKind | None
    reason: str | None


class Waited(TypedDict):
    """The last three are there once it is done."""

    done: bool
    left: int
    running: int
    selection: str
    succeeded: NotRequired[int]
    failed: NotRequired[list[Unsuccessful]]
    failed_count: NotRequired[int]


class Cleaned(TypedDict):
    jobs: int
    bytes: int


class TagStanding(TypedDict):
    tag: str
    stopped: bool
