"""Every route of the API: what it does, which query and body it takes, what it answers; and the OpenAPI document."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from gpuyard.schema import jobs, machine, queue, requests
from gpuyard.schema.queue import ErrorBody
from gpuyard.version import API, __version__

Schema = dict[str, Any]

JSON = "application/json"
EVENTS = "text/event-stream"


class Operation(Struct, frozen=True, kw_only=True):
    """`query`, `body` and `answer` are the Structs that are decoded and encoded. `name` is the verb of the command line
    where there is one."""

    name: str
    method: str
    path: str
    summary: str
    answer: Any
    body: Any = None
    query: type[Struct] | None = None
    media: str = JSON
    is_of_page: bool = False  # not on the daemon's own socket


def _get(
    name: str, path: str, summary: str, answer: Any, query: type[Struct] | None = None, **others: Any
) -> Operation:
    return Operation(name=name, method="GET", path=API + path, summary=summary, answer=answer, query=query, **others)


def _post(name: str, path: str, summary: str, answer: Any, body: Any = None) -> Operation:
    return Operation(name=name, method="POST", path=API + path, summary=summary, answer=answer, body=body)


def _change(verb: str, summary: str, body: Any = requests.ChangeRequest) -> Operation:
    return _post(verb, f"/jobs/{verb}", summary, queue.ChangeSummary, body)


_QUEUE = (
    _get("status", "/status", "The state of the daemon and the queue.", queue.DaemonStatus),
    _post("submit", "/submissions", "Submit one job or many.", queue.SubmitResult, requests.SubmissionBody),
    _post("preview", "/submissions/preview", "Check a submission and list its jobs, without submitting them.",
          queue.SubmissionPreview, requests.SubmissionBody),
    _get("queue", "/jobs", "Jobs: running, waiting in queue order, then finished; or the newest first.", jobs.JobPage,
         requests.JobsQuery),
    _get("wait", "/wait", "Answer when these jobs, or all, have finished, or when the timeout is over.",
         queue.WaitResult, requests.WaitQuery),
    _post("reported", "/wait/reported", "Do not report these jobs again to a wait of this shell.", queue.ReportedResult,
          requests.ReportedWait),
    _post("pause", "/pause", "Start no more jobs.", queue.PauseResult),
    _post("unpause", "/unpause", "Start jobs again.", queue.PauseResult),
    _post("drain", "/drain", "Let running jobs finish, and start no more.", queue.PauseResult),
    _post("clean", "/clean", "Remove old finished jobs, and logs beyond the limits.", queue.CleanResult,
          requests.CleanRequest),
    _post("stop", "/stop", "Stop the daemon; jobs keep running.", queue.StopResult, requests.StopRequest),
)  # fmt: skip

_JOBS = (
    _get("sweep", "/sweeps/{id}", "The runs of a sweep or an array, as a table.", jobs.SweepPage,
         requests.SweepQuery),
    _get("show", "/jobs/{id}", "All details of a job.", jobs.JobDetails, requests.ShowQuery),
    _get("why", "/jobs/{id}/why", "Why a job does not start, and when it may.", jobs.WaitExplanation),
    _get("world", "/jobs/{id}/world", "What the plan about a waiting job follows from, to decide it again.",
         jobs.ExportedWorld),
    _get("history", "/jobs/{id}/history", "Everything that happened to a job.", jobs.JobHistory),
    _get("logs", "/jobs/{id}/log", "The end of a job's log.", jobs.LogTail, requests.LogQuery),
    _get("follow", "/jobs/{id}/log/live",
         'A job\'s log as it is written: `{"text"}`, `{"attempt"}` when another one starts, `{"over"}` at the end.',
         str, requests.LogQuery, media=EVENTS),
    _post("resubmit", "/jobs/{id}/resubmit", "Submit a job like this one, with changes.", queue.SubmitResult,
          requests.ResubmitBody),
    _change("edit", "Change options of waiting jobs.", requests.EditRequest),
    _change("cancel", "Stop jobs, or remove them from the queue."),
    _change("hold", "Keep jobs from starting until they are released."),
    _change("release", "Let held jobs start.", requests.RunAgainRequest),
    _change("retry", "Run finished jobs again, and those skipped because of them.", requests.RetryRequest),
    _change("suspend", "Move the device memory of jobs to RAM, and pause them."),
    _change("resume", "Continue suspended jobs when their memory fits."),
    _change("priority", "Set the priority: higher starts earlier.", requests.PriorityRequest),
    _get("export", "/exports", "Jobs for another scheduler: all that wait, or these.", jobs.ExportPage,
         requests.ExportQuery),
)  # fmt: skip

_BATCHES = (
    _get("batch", "/batches/{id}", "The state of a batch, by the id of its first job.", jobs.BatchStatus),
    _get("batch_runs", "/batches/{id}/runs", "The runs of a batch.", jobs.BatchRunPage, requests.RunsQuery),
    _get("tasks", "/tasks", "The tasks of a workspace's tag: the last job of each config.", jobs.TaskList,
         requests.TagQuery),
    _post("stop_tag", "/tags/stop", "Start no more jobs of a tag.", queue.TagState, requests.TagRequest),
    _post("go_tag", "/tags/go", "Start jobs of a tag again.", queue.TagState, requests.TagRequest),
    _get("estimates", "/estimates", "Estimates learned from past runs, the latest first.", queue.EstimateList,
         requests.EstimatesQuery),
    _get("export_estimates", "/estimates/export", "Estimates to import on another machine, a page at a time.",
         queue.ProfilePage, requests.ProfilesQuery),
    _post("import_estimates", "/estimates/import", "Add estimates of another machine.", queue.ImportResult,
          requests.ImportRequest),
    _post("forget_estimates", "/estimates/forget", "Forget estimates.", queue.ForgetResult, requests.ForgetRequest),
)  # fmt: skip

_MACHINE = (
    _get("devices", "/devices", "The devices, who uses their memory, and the host.", machine.MachineState),
    _post("drain_devices", "/devices/drain", "Start nothing new on these devices.", machine.DrainResult,
          requests.DrainRequest),
    _post("undrain_devices", "/devices/undrain", "Let work start on these devices again.", machine.DrainResult,
          requests.UndrainRequest),
    _post("clear_devices", "/devices/clear", "Let work start on devices that were faulty, after a repair.",
          machine.ClearResult, requests.UndrainRequest),
    _get("device_history", "/devices/history", "Usage of devices and host over time; gaps where no sample was taken.",
         machine.DeviceHistory, requests.DeviceHistoryQuery),
    _get("timeline", "/timeline", "What ran where, and when.", machine.JobTimeline, requests.TimelineQuery),
    _get("report", "/report", "GPU-hours, waits, waste and failures.", machine.ReportAnswer, requests.ReportQuery),
    _get("summary", "/summary", "What succeeded and failed since last evening, why, and what it cost.",
         machine.QueueSummary, machine.SummaryQuery),
    _get("events", "/events", 'Answers whenever they change, each as `{"watch", "answer"}`.', str, requests.EventsQuery,
         media=EVENTS),
    Operation(name="metrics", method="GET", path="/metrics", summary="Prometheus metrics.", answer=str,
              media="text/plain"),
    Operation(name="openapi", method="GET", path="/openapi.json", summary="This document.", answer=dict[str, Any]),
)  # fmt: skip

_PAGE = (
    _get("web", "/web", "Whether the web page is served, and where.", machine.PageState),
    _post("open_web", "/web", "Serve the web page.", machine.PageState, requests.PageRequest),
    _post("stop_web", "/web/stop", "Stop serving the web page.", machine.PageStopResult),
    _get("session", "/session", "Whose page it is, and whether it may change anything.", machine.PageSession,
         is_of_page=True),
)  # fmt: skip

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    (each.method, each.path): each for each in (*_QUEUE, *_JOBS, *_BATCHES, *_MACHINE, *_PAGE)
}


# The document

_REFERENCE = "#/components/schemas/{name}"
_ID: Schema = {"type": "integer", "minimum": 1, "maximum": 10**18 - 1}
_DESCRIPTION = (
    "HTTP and JSON on a unix socket that only its owner can use, and, after `gpuyard web`, on a port that requires a "
    "token. Keys and routes are only ever added. Unknown is null, never zero."
)
_ERRORS = {
    400: "The request is wrong: the hint says what to send instead.",
    401: "Over the page's port: the token is missing or wrong.",
    403: "Over the page's port: this is not allowed there.",
    404: "There is no such job or route.",
    405: "The route does not take this method.",
    409: "The present state does not allow it.",
    413: "The body is too large.",
    422: "The job can never run on this machine.",
    429: "Too many requests.",
    503: "The machine does not allow it now.",
}
_NAME = re.compile(r"\{(\w+)\}")


@cache
def document() -> bytes:
    return msgspec.json.encode(describe(OPERATIONS.values()))


def describe(operations: Iterable[Operation]) -> Schema:
    """Return an OpenAPI document with these operations."""
    described = tuple(operations)
    queries = {operation.query.__name__: operation.query for operation in described if operation.query}
    types = [each for operation in described for each in (operation.body, operation.answer) if each]
    schemas, components = msgspec.json.schema_components(
        [ErrorBody, *types, *queries.values()], ref_template=_REFERENCE
    )
    error, *others = schemas
    next_schema = iter(others)
    paths: dict[str, Schema] = {}
    for operation in described:
        body = next(next_schema) if operation.body else None
        query: Schema = components[operation.query.__name__] if operation.query else {}
        required = query.get("required", ())
        entry = {
            "operationId": operation.name,
            "summary": operation.summary,
            "parameters": [
                *(
                    {"name": name, "in": "path", "required": True, "schema": _ID}
                    for name in _NAME.findall(operation.path)
                ),
                *(
                    {"name": name, "in": "query", "schema": schema, **({"required": True} if name in required else {})}
                    for name, schema in query.get("properties", {}).items()
                ),
            ],
            **({"requestBody": {"content": {JSON: {"schema": body}}}} if body else {}),
            "responses": {
                "200": _response("The answer.", operation.media, next(next_schema)),
                **{str(status): {"$ref": f"#/components/responses/{status}"} for status in _ERRORS},
            },
        }
        paths.setdefault(operation.path, {})[operation.method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpuyard",
            "version": __version__,
            "summary": "The queue of a GPU scheduler.",
            "description": _DESCRIPTION,
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in components.items() if name not in queries},
            "responses": {str(status): _response(text, JSON, error) for status, text in _ERRORS.items()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _response(text: str, media: str, schema: Schema) -> Schema:
    return {"description": text, "content": {media: {"schema": schema}}}
