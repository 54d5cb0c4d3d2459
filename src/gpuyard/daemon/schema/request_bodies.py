"""What requests may say in their bodies, for `openapi`; whoever reads one checks it himself.

Bounds are for the schemas alone: msgspec 0.22 corrupts its memory where a bounded text and a list are alternatives.
"""

from typing import Annotated, NotRequired, TypedDict

from msgspec import Meta

from gpuyard.core.job.job import OnPreempt, OnReboot
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.workspace_task import Task
from gpuyard.core.scheduling.tag_sharing import TagSharing
from gpuyard.core.snapshot import Vendor

_STATE = "|".join(JobState)
_JOBS = r"\d{1,18}(-\d{1,18})?|(name|tag)=[^\s,]+|all"

Ids = Annotated[str, Meta(extra_json_schema={"pattern": rf"^[\s,]*(({_JOBS})([\s,]+|$))*$"})]
States = Annotated[str, Meta(extra_json_schema={"pattern": rf"^(({_STATE})(,|$))*$"})]
Duration = Annotated[str, Meta(extra_json_schema={"pattern": r"^\d{1,9}(\.\d+)?(ms|s|m|h|d)?$"})]
_Size = Annotated[str, Meta(extra_json_schema={"pattern": r"^\d{1,9}(\.\d+)?([KMGT](i?B)?)?$"})]
_Whole = Annotated[str, Meta(extra_json_schema={"pattern": r"^-?\d{1,9}$"})]
_Decimal = Annotated[str, Meta(extra_json_schema={"pattern": r"^\d{1,9}(\.\d+)?$"})]
_Word = Annotated[str, Meta(extra_json_schema={"pattern": r"^[\w.:/-]{1,100}$"})]

# As they are typed after `gpuyard submit`; figures may be numbers.
Flag = bool | None
Text = str | None
Many = str | list[str] | None
Word = _Word | None
Time = Duration | Annotated[float, Meta(extra_json_schema={"minimum": 0})] | None
Size = _Size | Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0})] | None
Whole = _Whole | int | None
Decimal = _Decimal | Annotated[float, Meta(extra_json_schema={"minimum": 0})] | None
Others = Ids | list[Ids] | None

SubmitOptions = TypedDict(
    "SubmitOptions",
    {
        "gpus": Whole,
        "vram": Size,
        "exclusive": Flag,
        "ram": Size,
        "cpus": Whole,
        "engine": Word,
        "engine-option": Many,
        "device": Text,
        "vendor": Vendor | None,
        "gpu-name": Text,
        "max-cpu": Decimal,
        "min-free-mem-mb": Decimal,
        "max-gpu": Decimal,
        "max-gpu-mem-mb": Decimal,
        "max-power-w": Decimal,
        "priority": Whole,
        "preempt": Flag,
        "on-preempt": OnPreempt | None,
        "after": Others,
        "after-any": Others,
        "after-failed": Others,
        "retries": Whole,
        "time-limit": Time,
        "grace": Time,
        "duration": Time,
        "name": Word,
        "tag": Word,
        "array": Text,
        "sweep": Many,
        "env": Many,
        "stdin": Text,
        "on-reboot": OnReboot | None,
        "hold": Flag,
        "log-cap": Size,
        "notify": Many,
        "concurrency": Whole,
        "smoothing": Time,
        "steady": Time,
        "stagger": Time,
        "run-ram": Size,
        "sample-log": Text,
    },
    total=False,
)


class Submission(TypedDict, total=False):
    """A `command`, or a `list`, the text of a file with a command per line; a `table`, the text of a CSV file, fills in
    a command's {NAMES}. A `token` makes it count once, however often it is sent; `configuration`, a digest of the files
    it depends on, tells apart what was learned. Without `cwd` and `environment`, they are the user's home and the
    daemon's own. A `concurrency` makes it a batch; a `task` and a `crew` one of a workspace."""

    token: str
    cwd: str
    environment: dict[str, str] | None
    configuration: str
    command: list[str] | None
    list: str | None
    table: str | None
    options: SubmitOptions
    task: Task | None
    crew: TagSharing | None


class Resubmission(TypedDict, total=False):
    """What is to be different; a command in one line is taken as a shell would."""

    token: str
    command: list[str] | str | None
    options: SubmitOptions


class Filter(TypedDict, total=False):
    state: States
    search: str
    tag: str
    user: str


class Chosen(TypedDict, total=False):
    """By their `ids`, or all that are as `where` says."""

    ids: Ids | list[int | Ids]
    where: Filter


class Prioritised(Chosen):
    priority: Annotated[int, Meta(extra_json_schema={"minimum": -1_000_000, "maximum": 1_000_000})]


class OlderThan(TypedDict):
    older_than_s: Duration | Annotated[float, Meta(extra_json_schema={"minimum": 0})]


class Tagged(TypedDict):
    tag: Annotated[str, Meta(extra_json_schema={"minLength": 1})]


class Words(TypedDict):
    """Each the beginning of a fingerprint, or all together a part of the command; or all that there are."""

    words: NotRequired[list[str]]
    all: NotRequired[bool]


class Ending(TypedDict, total=False):
    """With a `pid`, only the daemon that has it ends. `restart`: another is to be started, by the service manager where
    there is one. `reason` goes to the log."""

    pid: int
    restart: bool
    reason: str


class PageWanted(TypedDict, total=False):
    """What is left out stays as it is, or is as the configuration has it."""

    address: str | None
    port: Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": 65535})] | None
    read_only: bool | None
    new_token: bool
