"""Every route as others are told of it: what it does, what it takes, what it answers with. `openapi` writes it down."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from gpuyard.connect.fast_http import API
from gpuyard.daemon.schema import batch_answers as batches
from gpuyard.daemon.schema import job_answers as jobs
from gpuyard.daemon.schema import machine_answers as machine
from gpuyard.daemon.schema import queue_answers as queue
from gpuyard.daemon.schema import request_bodies as bodies

JSON = "application/json"
EVENTS = "text/event-stream"

Flag: TypeAlias = Literal["1"]
Whole = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": 999_999_999})]
Positive = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": 999_999_999})]
Number = Annotated[float, Meta(extra_json_schema={"minimum": 0})]
Epoch = Annotated[float, Meta(description="seconds since 1970")]


class Parameter(Struct, frozen=True):
    """One of a query's; `kind` is its type."""

    name: str
    kind: Any
    says: str
    is_required: bool = False


class Operation(Struct, frozen=True, kw_only=True):
    """`answer` and `body` are types; without a `body` none is looked at. `name` is the verb, where there is one."""

    name: str
    method: str
    path: str
    says: str
    answer: Any
    body: Any = None
    query: tuple[Parameter, ...] = ()
    media: str = JSON
    is_of_page: bool = False  # not on the daemon's own socket

    @property
    def is_stream(self) -> bool:
        return self.media == EVENTS


def _get(name: str, path: str, says: str, answer: Any, *query: Parameter, media: str = JSON) -> Operation:
    return Operation(name=name, method="GET", path=API + path, says=says, answer=answer, query=query, media=media)


def _post(name: str, path: str, says: str, answer: Any, body: Any = None) -> Operation:
    return Operation(name=name, method="POST", path=API + path, says=says, answer=answer, body=body)


def _change(verb: str, says: str, body: Any = bodies.Chosen) -> Operation:
    return _post(verb, f"/jobs/{verb}", says, queue.Changed, body)


_IDS = Parameter("ids", bodies.Ids, "which jobs: 17, 17-20, name=big, tag=night, all, separated by spaces")
_LIMIT = Parameter("limit", Whole, "at most so many")
_AFTER = Parameter("after", Whole, "from there on: what the last page has as its `next`")
_ATTEMPT = Parameter("attempt", Positive, "of this attempt; of the last one, where none is named")
_TAIL = Parameter("tail", Whole, "at most so many bytes of the end")

_QUEUE = (
    _get("status", "/status", "How the daemon and the queue stand.", queue.Status),
    _post("submit", "/submissions", "Put a program, or many, into the queue.", queue.Submitted, bodies.Submission),
    _get(
        "queue",
        "/jobs",
        "Jobs: those that run, those that wait in their order, the others; or the newest first.",
        jobs.JobPage,
        _IDS,
        Parameter("state", bodies.States, "only those in one of these states, such as failed,cancelled"),
        Parameter("search", str, "only those with this in their name, tag or command, or with this id"),
        Parameter("tag", str, "only those with this tag"),
        Parameter("user", str, "only those of this user"),
        Parameter("all", Flag, "all that ever finished, too"),
        Parameter("order", Literal["queue", "newest"], "as they will start, or the newest first"),
        _LIMIT,
        _AFTER,
    ),
    _get(
        "wait",
        "/wait",
        "Answers when these jobs, or all, are finished, or when the time is up.",
        queue.Waited,
        _IDS,
        Parameter("timeout", Number, "at most so many seconds; never more than 30"),
    ),
    _post("pause", "/pause", "Nothing new starts.", queue.Brakes),
    _post("unpause", "/unpause", "The queue goes on.", queue.Brakes),
    _post("drain", "/drain", "What runs comes to its end, and nothing new starts.", queue.Brakes),
    _post(
        "clean", "/clean", "Forget jobs that finished long ago, and their logs.", queue.Cleaned, bodies.OlderThan
    ),
    _post("stop", "/stop", "End the daemon; jobs go on.", queue.Stopping, bodies.Ending),
)  # fmt: skip

_JOBS = (
    _get(
        "show",
        "/jobs/{id}",
        "All about one job.",
        jobs.JobInFull,
        Parameter("environment", Flag, "with the values of its variables, which may be secrets"),
    ),
    _get("why", "/jobs/{id}/why", "Why it does not start, and when it may.", jobs.Why),
    _get("history", "/jobs/{id}/history", "All that happened to it.", jobs.Story),
    _get("logs", "/jobs/{id}/log", "What it wrote: the end of it.", jobs.Log, _ATTEMPT, _TAIL),
    _get(
        "follow",
        "/jobs/{id}/log/live",
        'What it writes: `{"text"}` as it comes, `{"attempt"}` where another one begins, `{"over"}` at the end.',
        str,
        _ATTEMPT,
        _TAIL,
        media=EVENTS,
    ),
    _post(
        "resubmit", "/jobs/{id}/resubmit", "A new job like this one, with changes.", queue.Submitted,
        bodies.Resubmission,
    ),
    _change("cancel", "They end, or never start."),
    _change("hold", "They do not start until they are released."),
    _change("release", "Those that were held may start."),
    _change("retry", "Those that have ended run again."),
    _change("suspend", "Their device memory is moved to RAM, and they pause."),
    _change("resume", "Those that were suspended go on, when there is room."),
    _change("priority", "Higher starts earlier.", bodies.Prioritised),
    _get(
        "export", "/exports", "Jobs as others could run them: those that wait, or these.", jobs.Export, _IDS, _AFTER
    ),
)  # fmt: skip

_MORE = (
    _get("batch", "/batches/{id}", "How a batch stands, by its first job.", batches.Batch),
    _get("batch_runs", "/batches/{id}/runs", "What became of its runs.", batches.BatchRuns, _LIMIT, _AFTER),
    _get(
        "tasks", "/tasks", "The tasks of a workspace's tag: the last job of each config.", batches.Tasks,
        Parameter("tag", str, "whose", is_required=True),
    ),
    _post("stop_tag", "/tags/stop", "No job of that tag starts; what runs goes on.", queue.TagStanding, bodies.Tagged),
    _post("go_tag", "/tags/go", "Jobs of that tag may start again.", queue.TagStanding, bodies.Tagged),
    _get("estimates", "/estimates", "What was learned about programs, the last seen first.", batches.Estimates, _LIMIT),
    _post("forget_estimates", "/estimates/forget", "Forget what was learned.", batches.Forgotten, bodies.Words),
)  # fmt: skip

_MACHINE = (
    _get("devices", "/devices", "The devices, who has their memory, and the machine around them.", machine.Devices),
    _get(
        "device_history", "/devices/history", "Usage of devices and host over time; gaps where no sample was taken.",
        machine.History,
        Parameter("span", Literal["10m", "1h", "24h"], "how far back"),
    ),
    _get(
        "timeline", "/timeline", "What ran where, and when.", machine.Timeline,
        Parameter("span", bodies.Duration, "how far back, such as 1h"),
        Parameter("until", Epoch, "up to when; now, where it is left out"),
    ),
    _get(
        "report", "/report", "GPU-hours, waits, waste and failures.", machine.Report,
        Parameter("since", bodies.Duration, "how far back, such as 7d"),
        Parameter("by", Literal["user", "workspace", "name"], "what its rows are"),
    ),
    _get(
        "events", "/events", 'Answers as they change, each as `{"watch", "answer"}`.', str,
        Parameter("watch", str, "what can be asked with GET, such as /status /jobs?state=running", is_required=True),
        media=EVENTS,
    ),
    Operation(
        name="metrics", method="GET", path="/metrics", says="Figures for Prometheus.", answer=str, media="text/plain"
    ),
    Operation(name="openapi", method="GET", path="/openapi.json", says="This document.", answer=dict[str, Any]),
)  # fmt: skip

_PAGE = (
    _get("web", "/web", "Whether the page is served, and where.", machine.PageStanding),
    _post("open_web", "/web", "Serve the page.", machine.PageStanding, bodies.PageWanted),
    _post("stop_web", "/web/stop", "No longer serve the page.", machine.PageStopped),
    Operation(
        name="session",
        method="GET",
        path=f"{API}/session",
        says="Whose page it is, and whether it may change anything.",
        answer=machine.Session,
        is_of_page=True,
    ),
)

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    (each.method, each.path): each for each in (*_QUEUE, *_JOBS, *_MORE, *_MACHINE, *_PAGE)
}
