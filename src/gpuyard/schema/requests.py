"""The queries and bodies of requests, as the daemon decodes them, and the keyword arguments of `Client.submit`.

Patterns of texts are for the OpenAPI document only; the code that parses a text checks its pattern. msgspec 0.22
corrupts memory where a text with a pattern and a list are alternatives."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

from msgspec import Meta, Struct

from gpuyard.model.command_line import read_line
from gpuyard.model.lifecycle import JobState
from gpuyard.model.option import Option
from gpuyard.model.shell_environment import Submitters
from gpuyard.model.submission import SubmissionRequest
from gpuyard.model.submit_options import MAX_PRIORITY, SUBMIT_OPTIONS
from gpuyard.report.usage_report import GroupBy
from gpuyard.schema.queue import LearnedProfile

_STATE = "|".join(JobState)
_JOBS = r"\d{1,18}(-\d{1,18})?|(name|tag|user|state|since)=[^\s,]+(,[^\s,=]+)*|all"
_IDS_PATTERN = rf"^[\s,]*(({_JOBS})([\s,]+|$))*$"
_DURATION_PATTERN = (
    r"^(\d{1,9}(\.\d+)?(ms|s|m|h|d)?"
    r"|(?=\d)(\d{1,9}d)?(\d{1,9}h)?(\d{1,9}m)?(\d{1,9}s)?"
    r"|(\d{1,9}-)?\d{1,9}(:[0-5]\d){2})$"
)


def _pattern(text: str) -> Meta:
    return Meta(extra_json_schema={"pattern": text})


Duration = Annotated[str, _pattern(_DURATION_PATTERN)]
Ids = Annotated[
    str,
    _pattern(_IDS_PATTERN),
    Meta(
        description="which jobs, separated by spaces: 17, 17-20, state=failed, tag=night, name=big, since=22:00, all; "
        "a job has one of the ids and meets each condition"
    ),
]


def _count(description: str, least: int = 0) -> Meta:
    return Meta(ge=least, le=999_999_999, description=description)


Limit = Annotated[int, _count("the most rows to return")]
After = Annotated[int, _count("the `next` of the page before")]


# Queries


class JobMatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All jobs for which each given key holds."""

    state: Annotated[
        str,
        _pattern(rf"^(({_STATE})(,|$))*$"),
        Meta(description="only jobs in one of these states, such as failed,cancelled"),
    ] = ""
    search: Annotated[
        str, Meta(description="only jobs with this text in their name, tag or command, or with this id")
    ] = ""
    tag: Annotated[str, Meta(description="only jobs with this tag")] = ""
    user: Annotated[str, Meta(description="only jobs of this user")] = ""


# Each column goes up, or down with a minus.
JobOrder: TypeAlias = Literal[
    "queue", "newest", "id", "-id", "state", "-state", "name", "-name", "reason", "-reason", "gpu", "-gpu", "memory",
    "-memory", "priority", "-priority", "time", "-time",
]  # fmt: skip


class JobsQuery(JobMatch, frozen=True, kw_only=True, forbid_unknown_fields=False):
    ids: Ids = ""
    all: Annotated[bool, Meta(description="with all finished jobs, not only the last ones")] = False
    order: Annotated[
        JobOrder,
        Meta(description="in the order in which they will start, the newest first, or by a column, such as -time"),
    ] = "queue"
    limit: Limit = 50
    after: After = 0
    fold: Annotated[
        bool, Meta(description="one row for each sweep and array; only in queue order, and without conditions")
    ] = False


class SweepQuery(Struct, frozen=True, kw_only=True):
    sort: Annotated[
        str,
        _pattern(r"^(-?[^\x00-\x1f\x7f]{1,64})?$"),
        Meta(description="sort by this column, with - before it from the last to the first"),
    ] = ""
    state: Annotated[str, _pattern(rf"^(({_STATE})(,|$))*$"), Meta(description="only runs in one of these states")] = ""
    limit: Limit = 50
    after: After = 0


class WaitQuery(Struct, frozen=True, kw_only=True):
    ids: Ids = ""
    submitters: Annotated[
        str,
        Meta(
            max_length=2000,
            description="without ids: the jobs that the first of these processes has submitted which submitted any",
        ),
    ] = ""
    stuck: Annotated[bool, Meta(description="answer when only jobs are left that nothing will release, too")] = False
    timeout: Annotated[float, Meta(ge=0, description="answer after this many seconds at the latest, at most 30")] = 30.0


class ReportedWait(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The jobs with these `ids` have been reported to a user: a wait of the first of the `submitters` that has
    submitted jobs does not report them again before they run again. `own`: a wait without ids has selected them."""

    ids: Ids
    submitters: Submitters
    own: bool = False


class ShowQuery(Struct, frozen=True, kw_only=True):
    environment: Annotated[bool, Meta(description="with the values of its variables, which may be secrets")] = False


class LogQuery(Struct, frozen=True, kw_only=True):
    attempt: Annotated[int, _count("of this attempt; default: the last one", least=1)] | None = None
    tail: Annotated[int, _count("the most bytes of the end to return")] = 65_536
    stream: Annotated[
        Literal["stdout", "stderr", "both"],
        Meta(description="stderr: of a job whose standard error has a file of its own; both: with that, if it has one"),
    ] = "stdout"


class ExportQuery(Struct, frozen=True, kw_only=True):
    ids: Ids = ""
    after: After = 0


class RunsQuery(Struct, frozen=True, kw_only=True):
    limit: Limit = 1000
    after: After = 0


class TagQuery(Struct, frozen=True, kw_only=True):
    tag: Annotated[str, Meta(min_length=1, description="the workspace's tag")]


class EstimatesQuery(Struct, frozen=True, kw_only=True):
    limit: Limit = 50


class ProfilesQuery(Struct, frozen=True, kw_only=True):
    after: Annotated[str, Meta(description="the `next` of the page before")] = ""


class DeviceHistoryQuery(Struct, frozen=True, kw_only=True):
    span: Annotated[Literal["10m", "1h", "24h"], Meta(description="how far back")] = "10m"


class TimelineQuery(Struct, frozen=True, kw_only=True):
    span: Annotated[Duration, Meta(description="how far back, such as 1h")] = "1h"
    until: Annotated[float, Meta(ge=0, description="seconds since 1970; default: now")] | None = None


class ReportQuery(Struct, frozen=True, kw_only=True):
    since: Annotated[Duration, Meta(description="how far back, such as 7d")] = "7d"
    by: Annotated[GroupBy, Meta(description="what the rows are")] = GroupBy.USER


class EventsQuery(Struct, frozen=True, kw_only=True):
    watch: Annotated[str, Meta(description="GET routes to watch, such as /status /jobs?state=running")]


# Bodies


class ChangeRequest(Struct, frozen=True, kw_only=True):
    """The jobs with these `ids`, or all that match `where`."""

    ids: Ids | int | list[int | Ids] | None = None
    where: JobMatch | None = None


class RunAgainRequest(ChangeRequest, frozen=True, kw_only=True):
    """`environment` has values for the variables that the jobs lack: gpuyard keeps no secrets of jobs that have ended.
    With `allow_missing` they run without those that it does not have."""

    environment: dict[str, str] = {}
    allow_missing: bool = False


class PriorityRequest(ChangeRequest, frozen=True, kw_only=True):
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class RetryRequest(RunAgainRequest, frozen=True, kw_only=True):
    """With `only`, jobs that were skipped because of these stay rejected. Ids that are named one by one are retried in
    any finished state; of a larger selection without a state, only jobs that failed or were rejected, or all of them
    with `all`."""

    only: bool = False
    all: bool = False


class CleanRequest(Struct, frozen=True, kw_only=True):
    """The jobs that ended at least this long ago, in seconds or such as "30d"; default: what `[keep]` says."""

    older_than_s: Annotated[float, Meta(extra_json_schema={"minimum": 0})] | Duration | None = None


class TagRequest(Struct, frozen=True, kw_only=True):
    tag: Annotated[str, Meta(min_length=1)]


class UndrainRequest(Struct, frozen=True, kw_only=True):
    """Devices by their numbers or ids."""

    devices: Annotated[list[str | int], Meta(min_length=1)]


class DrainRequest(UndrainRequest, frozen=True, kw_only=True):
    reason: str = ""


class ForgetRequest(Struct, frozen=True, kw_only=True):
    """The estimates whose fingerprint starts with one of `words`, or whose command contains all `words`, joined by
    spaces; or `all` estimates."""

    words: list[str] = []
    all: bool = False


class ImportRequest(Struct, frozen=True, kw_only=True):
    """Estimates as they are exported, at most 1000. Those that were learned here stay, unless `replace` is true."""

    estimates: Annotated[list[LearnedProfile], Meta(max_length=1000)]
    replace: bool = False


class StopRequest(Struct, frozen=True, kw_only=True):
    """With a `pid`, only the daemon with this pid stops. With `restart`, its exit status makes a service manager start
    the next one. `reason` is written to the log."""

    pid: int | None = None
    restart: bool = False
    reason: str = "asked for"


class PageRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays as it is, or is taken from the configuration."""

    address: str | None = None
    port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    read_only: bool | None = None
    new_token: bool = False


# Submissions, with options from the table of submit options

_TEXT = {"type": "string"}
_IDS = {"type": "string", "pattern": _IDS_PATTERN}
# The JSON types of each kind of option. Numbers may be sent as numbers, or as a user types them.
_KINDS: dict[str, list[dict[str, Any]]] = {
    "flag": [{"type": "boolean"}],
    "whole": [{"type": "integer"}, {"type": "string", "pattern": r"^-?\d{1,9}$"}],
    "number": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": r"^\d{1,9}(\.\d+)?$"}],
    "size": [
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "string", "pattern": r"^\d{1,9}(\.\d+)?([KMGT](i?B)?)?$"},
    ],
    "time": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": _DURATION_PATTERN}],
    "text": [_TEXT],
    "word": [{"type": "string", "pattern": r"^[\w.:/-]{1,100}$"}],
    "texts": [_TEXT, {"type": "array", "items": _TEXT}],
    "ids": [_IDS, {"type": "array", "items": _IDS}],
}


def _describe(option: Option) -> dict[str, Any]:
    kinds = [{"enum": list(option.choices)}] if option.kind == "choice" else _KINDS[option.kind]
    return {"description": option.help_with_default, "anyOf": [*kinds, {"type": "null"}]}


_OPTIONS = Meta(
    extra_json_schema={
        "properties": {name: _describe(option) for name, option in SUBMIT_OPTIONS.items()},
        "additionalProperties": False,
    }
)


class SubmissionBody(SubmissionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    __doc__ = SubmissionRequest.__doc__

    options: Annotated[dict[str, Any], _OPTIONS] = {}


class ResubmitBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The changes: another `command`, as a list or as a shell would read it, and other options. A command that begins
    with an option or a setting, such as `--lr 1e-3` or `lr=1e-3`, changes these arguments of the old one."""

    command: str | tuple[str, ...] | None = None
    options: Annotated[dict[str, Any], _OPTIONS] = {}
    token: str = ""
    submitters: Submitters = ()

    @property
    def arguments(self) -> tuple[str, ...] | None:
        return (read_line(self.command.strip()) if isinstance(self.command, str) else self.command) or None


class EditRequest(ChangeRequest, frozen=True, kw_only=True):
    """`options` replace those of the jobs; an option that is null is removed."""

    options: Annotated[dict[str, Any], _OPTIONS] = {}


Whole: TypeAlias = int | str
Number: TypeAlias = float | str
Size: TypeAlias = float | str  # MB, or a text such as "8G"
Time: TypeAlias = float | str  # seconds, or a text such as "4h"
Texts: TypeAlias = str | Sequence[str]
JobIds: TypeAlias = int | str | Sequence[int | str]


class SubmitKwargs(TypedDict, total=False):
    """The submit options as types, for type checkers and editors. A test compares it with the table of options."""

    gpus: Whole | None
    vram: Size | None
    exclusive: bool | None
    ram: Size | None
    cpus: Whole | None
    engine: str | None
    engine_option: Texts | None
    device: str | None
    vendor: Literal["nvidia", "amd", "intel", "apple", "simulated"] | None
    gpu_name: str | None
    linked: bool | None
    same_node: bool | None
    max_cpu: Number | None
    min_free_mem_mb: Number | None
    min_free_disk: Size | None
    max_gpu: Number | None
    max_gpu_mem_mb: Number | None
    max_power_w: Number | None
    priority: Whole | None
    preempt: bool | None
    on_preempt: Literal["suspend", "requeue", "never"] | None
    after: JobIds | None
    after_any: JobIds | None
    after_failed: JobIds | None
    after_each: JobIds | None
    retries: Whole | None
    retry_on: Texts | None
    retry_delay: Time | None
    time_limit: Time | None
    grace: Time | None
    signal: str | None
    duration: Time | None
    name: str | None
    tag: str | None
    array: str | None
    sweep: Texts | None
    sample: Whole | None
    seed: Whole | None
    env: Texts | None
    image: str | None
    mount: Texts | None
    container_option: Texts | None
    stdin: str | None
    on_reboot: Literal["requeue", "hold", "fail"] | None
    notify: Texts | None
    hold: bool | None
    log_cap: Size | None
    output: str | None
    error: str | None
    split_stderr: bool | None
    timestamps: bool | None
    at: str | None
    stagger: Time | None
    concurrency: Whole | None
    smoothing: Time | None
    steady: Time | None
    run_ram: Size | None
    output_root: str | None
    sample_log: str | None
