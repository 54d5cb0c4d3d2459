"""What was typed after `gpuyard submit`, made into jobs: one spec that they share, and what differs between them.

Values arrive as they were typed, from the command line or from whoever speaks to the socket, and are checked here.
"""

import csv
import io
import itertools
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.job.job import DEFAULT_GRACE_S, DEFAULT_LOG_CAP_MB, DependencyKind, JobSpec, OnPreempt, OnReboot
from gpuyard.core.job.option_parser import Options
from gpuyard.core.job.selection import JobSelection, parse_selection
from gpuyard.core.job.workspace_task import Task
from gpuyard.core.lease import Need
from gpuyard.core.notify.subscriptions import MAX_SUBSCRIPTIONS, Subscription, parse_subscription
from gpuyard.core.scheduling.batch_pacing import DEFAULT_SMOOTHING_S, DEFAULT_STEADY_S, BatchPace
from gpuyard.core.scheduling.tag_sharing import TagSharing
from gpuyard.core.snapshot import Vendor
from gpuyard.errors import UserError

MOST_JOBS = 1_000_000
# The engine that runs jobs on this machine.
LOCAL = "local"
# The priority of a job that may preempt others, where none is given: those of its own priority make no room for it.
URGENT = 100
_ARRAY = re.compile(r"(\d{1,9})-(\d{1,9})(?::(\d{1,9}))?(?:%(\d{1,9}))?", re.ASCII)
_SPAN = re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII)
_PLACEHOLDER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Spreadsheets write it before the first column's name.
_BYTE_ORDER_MARK = "\ufeff"
# What a shell would not take as it stands; a line without any of these needs no shell.
_FOR_A_SHELL = re.compile(r"[|&;<>()$`\\*?\[\]#~!{}\n]|^\s*\w+=")


class SubmissionRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A submission as it comes in. `token` makes it count once, however often it is sent; `configuration` is a digest
    of the files that its command names. A workspace's has a `task` and a `crew`. One who is in no folder, and has no
    variables, leaves them out: then they are the daemon's to choose."""

    cwd: str = ""
    environment: dict[str, str] | None = None
    token: str = ""
    configuration: str = ""
    command: tuple[str, ...] | None = None
    list: str | None = None
    table: str | None = None
    options: dict[str, Any] = {}
    task: Task | None = None
    crew: TagSharing | None = None


class ArrayElement(Struct, frozen=True, kw_only=True):
    """What sets one job of a submission apart."""

    index: int | None = None
    values: dict[str, str] = {}
    command: tuple[str, ...] | None = None


class Submission(Struct, frozen=True, kw_only=True):
    """`devices` are the names of those it may use, to be looked up on the machine; one whose `devices_are_optional`
    does without where there are none."""

    token: str
    spec: JobSpec
    priority: int
    count: int
    elements: Iterable[ArrayElement]
    dependencies: tuple[tuple[DependencyKind, JobSelection], ...] = ()
    devices: tuple[str, ...] | None = None
    group_limit: int | None = None
    is_held: bool = False
    devices_are_optional: bool = False


def parse_submission(asked: SubmissionRequest) -> Submission:
    options = Options(asked.options)
    pace = _pace(options) if "concurrency" in options else None
    need = _need(options, pace)
    count, elements, group_limit = _elements(asked, options)
    is_urgent = options.flag("preempt")
    is_many = count > 1 or group_limit is not None or options.text("array") is not None
    spec = JobSpec(
        command=asked.command or (),
        cwd=_directory(asked.cwd),
        environment={**(asked.environment or {}), **dict(map(_variable, options.texts("env")))},
        need=need,
        name=_one_line(options.text("name"), "--name"),
        tag=_one_line(options.text("tag"), "--tag") or "",
        retries=options.whole("retries", 0, least=0),
        time_limit_s=options.seconds("time-limit"),
        grace_s=_or(options.seconds("grace", may_be_zero=True), DEFAULT_GRACE_S),
        duration_s=options.seconds("duration"),
        on_reboot=options.choice("on-reboot", OnReboot),
        stdin=options.text("stdin"),
        log_cap_mb=_or(options.size("log-cap"), DEFAULT_LOG_CAP_MB),
        is_array=is_many,
        learns_memory=need.devices > 0 and need.memory_mb is None and not options.flag("exclusive"),
        configuration=asked.configuration,
        preempts=is_urgent,
        on_preempt=options.choice("on-preempt", OnPreempt) or OnPreempt.SUSPEND,
        pace=pace,
        crew=asked.crew,
        task=asked.task,
        engine=_engine(options),
        engine_options=tuple(map(_whole, options.texts("engine-option"))),
        cpus=options.whole("cpus", 0, least=1, most=100_000) or None,
        notify=_wishes(options.texts("notify")),
    )
    if spec.engine:
        _refuse_for_engine(spec, options)
    kinds = (("after", DependencyKind.OK), ("after-any", DependencyKind.ANY), ("after-failed", DependencyKind.FAILED))
    dependencies = tuple((kind, parse_selection(text)) for name, kind in kinds for text in options.texts(name))
    devices = options.text("device")
    submission = Submission(
        token=asked.token,
        spec=spec,
        priority=options.whole("priority", URGENT if is_urgent else 0, least=-1_000_000, most=1_000_000),
        count=count,
        elements=elements,
        dependencies=dependencies,
        devices=None if devices is None else tuple(filter(None, map(str.strip, devices.split(",")))),
        group_limit=group_limit,
        is_held=options.flag("hold"),
        devices_are_optional=pace is not None and "gpus" not in options and devices is None,
    )
    if spec.crew is not None and not spec.tag:
        raise UserError("a crew is the jobs of a tag, and these have none", hint="give them one")
    options.refuse_the_rest()
    return submission


def _engine(options: Options) -> str:
    """Empty for the local one."""
    name = _one_line(options.text("engine"), "--engine") or ""
    return "" if name == LOCAL else name


def _refuse_for_engine(spec: JobSpec, options: Options) -> None:
    """What only this machine's own GPUs can be asked for."""
    for name, has_it in (
        ("preempt", spec.preempts),
        ("device", "device" in options),
        ("concurrency", spec.pace is not None),
        ("max-gpu", spec.need.max_utilization_percent is not None),
        ("max-gpu-mem-mb", spec.need.max_memory_used_mb is not None),
        ("max-power-w", spec.need.max_power_w is not None),
        ("max-cpu", spec.need.max_cpu_percent is not None),
    ):
        if has_it:
            raise UserError(
                f"--{name} is about this machine, and {spec.engine} places the job itself",
                hint="leave it out; what the engine is to know goes into --engine-option",
            )


def _pace(options: Options) -> BatchPace:
    """The gates of a batch; the bounds that a single job has for itself are the batch's."""
    vram_mb, most_mb = options.size("vram"), options.number("max-gpu-mem-mb")
    if vram_mb is not None and most_mb is not None and vram_mb > most_mb:
        raise UserError(
            f"a run takes {vram_mb:.0f} MB of a GPU (--run-vram), and no more than {most_mb:.0f} MB may be used "
            "(--max-gpu-mem-mb)",
            hint="allow more, or none would ever start",
        )
    return BatchPace(
        max_cpu_percent=options.number("max-cpu"),
        min_free_memory_mb=options.number("min-free-mem-mb"),
        max_gpu_percent=options.number("max-gpu"),
        max_gpu_memory_mb=most_mb,
        run_ram_mb=options.size("run-ram"),
        smoothing_s=_or(options.seconds("smoothing", may_be_zero=True), DEFAULT_SMOOTHING_S),
        steady_s=_or(options.seconds("steady", may_be_zero=True), DEFAULT_STEADY_S),
        stagger_s=_or(options.seconds("stagger", may_be_zero=True), 0.0),
        sample_log=options.text("sample-log"),
    )


def _need(options: Options, pace: BatchPace | None) -> Need:
    gpus, vram_mb = options.whole("gpus", 1, least=0, most=1024), options.size("vram")
    is_exclusive = options.flag("exclusive")
    vendor, model = options.choice("vendor", Vendor), options.text("gpu-name")
    if model is not None and not model.isprintable():
        raise UserError("--gpu-name takes plain text", hint="a part of the GPU's name, such as H100")
    only_watches = pace is not None and pace.gates_devices
    names_gpu = "device" in options and not only_watches
    asks_for_gpu = vram_mb is not None or is_exclusive or vendor or model or names_gpu
    if gpus == 0 and asks_for_gpu:
        raise UserError("--gpus 0 asks for no GPU, and other options for one", hint="leave out one or the other")
    if gpus == 0 and options.flag("preempt"):
        raise UserError(
            "--preempt has others free their GPUs, and --gpus 0 asks for none", hint="leave out one of them"
        )
    return Need(
        devices=gpus,
        memory_mb=vram_mb,
        is_exclusive=is_exclusive or vram_mb is None,
        vendor=vendor,
        model=model,
        max_utilization_percent=options.number("max-gpu") if pace is None else None,
        max_power_w=options.number("max-power-w"),
        max_memory_used_mb=options.number("max-gpu-mem-mb") if pace is None else None,
        max_cpu_percent=options.number("max-cpu") if pace is None else None,
        min_host_memory_mb=_ram(options) if pace is None else None,
    )


def _ram(options: Options) -> float | None:
    """What it takes has to be there when it starts."""
    least, takes = options.number("min-free-mem-mb"), options.size("ram")
    return max((figure for figure in (least, takes) if figure is not None), default=None)


# The jobs of one submission


def _elements(asked: SubmissionRequest, options: Options) -> tuple[int, Iterable[ArrayElement], int | None]:
    """How many, which, and how many of them at once."""
    array = options.text("array")
    ways = {
        "--array": array,
        "--sweep": options.texts("sweep") or None,
        "--from": asked.list if asked.list is not None else asked.table,
    }
    chosen = [way for way, value in ways.items() if value is not None]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)} do not go together", hint="submit them one after the other")
    if asked.list is None and not asked.command:
        raise UserError("there is no program to run", hint="write it last: gpuyard submit -- python train.py")
    if asked.list is not None and asked.command:
        raise UserError("a list of commands goes with no program", hint="a CSV file's columns fill in one")
    if array is not None and "concurrency" in options:
        raise UserError("a batch is no array", hint="write --array 0-99%8 instead of a concurrency of 8")
    if array is not None:
        return _array(array)
    found = list(_many(asked, options))
    _refuse_too_many(len(found))
    if "concurrency" not in options:
        return len(found), found, None
    return len(found), list(map(_numbered, found)), options.whole("concurrency", 1, least=1)


def _many(asked: SubmissionRequest, options: Options) -> Iterator[ArrayElement]:
    if asked.list is not None:
        return _lines(asked.list.removeprefix(_BYTE_ORDER_MARK))
    if asked.table is not None:
        return _rows(asked.table.removeprefix(_BYTE_ORDER_MARK))
    if sweep := options.texts("sweep"):
        return _sweep(sweep)
    return iter([ArrayElement()])


def _numbered(element: ArrayElement) -> ArrayElement:
    """A run of a batch is known by its index."""
    index = element.values.get("index", "")
    return replace(element, index=int(index)) if index.isascii() and index.isdecimal() else element


def _array(text: str) -> tuple[int, Iterable[ArrayElement], int | None]:
    match = _ARRAY.fullmatch(text.strip())
    if match is None:
        raise UserError(f"'{text}' is not a range for --array", hint="write it as 0-99, 0-99:5 or 0-99%8")
    first, last, step, limit = (int(group) if group is not None else None for group in match.groups())
    assert first is not None
    assert last is not None
    if step == 0 or limit == 0 or last < first:
        raise UserError(f"'{text}' is an empty range for --array", hint="write it as 0-99, 0-99:5 or 0-99%8")
    indexes = range(first, last + 1, step or 1)
    _refuse_too_many(len(indexes))
    return len(indexes), (ArrayElement(index=index) for index in indexes), limit


def _refuse_too_many(count: int) -> None:
    if count > MOST_JOBS:
        raise UserError(f"{count:,} jobs at once are too many", hint=f"submit at most {MOST_JOBS:,}")


def _sweep(texts: list[str]) -> Iterator[ArrayElement]:
    axes: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not _PLACEHOLDER.fullmatch(name) or not values or name in axes:
            raise UserError(f"'{text}' is not a sweep", hint="write it once for each name: --sweep lr=1e-3,1e-4")
        spans = itertools.chain.from_iterable(map(_span, values.split(",")))
        axes[name] = list(itertools.islice(spans, MOST_JOBS + 1))
    _refuse_too_many(math.prod(map(len, axes.values())))
    for point in itertools.product(*axes.values()):
        yield ArrayElement(values=dict(zip(axes, point, strict=True)))


def _span(word: str) -> Iterable[str]:
    """`0-4` is five values; `1e-4` is one."""
    match = _SPAN.fullmatch(word)
    if match is None:
        return [word]
    first, last = int(match[1]), int(match[2])
    if last < first or last - first >= MOST_JOBS:
        raise UserError(f"'{word}' is not a range that can be swept", hint="write it as 0-4")
    return map(str, range(first, last + 1))


def _lines(text: str) -> Iterator[ArrayElement]:
    lines = [line.strip() for line in text.split("\n")]  # as a shell does: a form feed ends no command
    commands = [line for line in lines if line and not line.startswith("#")]
    if not commands:
        raise UserError("the file has no command in it", hint="write one on each line; lines with # are left out")
    for line in commands:
        yield ArrayElement(command=read_line(line))


def read_line(line: str) -> tuple[str, ...]:
    """A command as it is typed: by its words, or through a shell where it needs one."""
    if _FOR_A_SHELL.search(line):
        return ("/bin/sh", "-c", line)
    try:
        return tuple(shlex.split(line))
    except ValueError as error:
        raise UserError(f"'{line}' cannot be split into words: {error}", hint="close its quotes") from error


def _rows(text: str) -> Iterator[ArrayElement]:
    rows = csv.reader(io.StringIO(text), strict=True)
    try:
        names = [name.strip() for name in next(rows, [])]
        bad = next((name for name in names if not _PLACEHOLDER.fullmatch(name)), None)
        if bad is not None or not names or len(set(names)) < len(names):
            raise UserError("the CSV file's first line has to name its columns", hint="such as lr,seed")
        row = None
        for row in filter(None, rows):
            if len(row) != len(names):
                raise UserError(f"line {rows.line_num} of the CSV file has {len(row)} values for {len(names)} columns")
            yield ArrayElement(values=dict(zip(names, row, strict=True)))
        if row is None:
            raise UserError("the CSV file has no values in it", hint="write a line of them for each job")
    except csv.Error as error:
        raise UserError(f"line {rows.line_num} of the CSV file: {error}") from error


# Single values


def _directory(path: str) -> str:
    if not path.startswith("/"):
        raise UserError(f"the working directory '{path}' is not an absolute path")
    return path


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UserError("--env takes NAME=VALUE", hint="write it as --env LR=3e-4")  # the text may be a secret
    return name, value


def _one_line(text: str | None, what: str) -> str | None:
    if text is not None and (not text.isprintable() or any(letter in text for letter in " ,=") or len(text) > 100):
        raise UserError(f"{what} takes a word without spaces, commas and equals signs, of at most 100 letters")
    return text


def _whole(text: str) -> str:
    if not text.isprintable():
        raise UserError("--engine-option takes plain text", hint="something in it is no letter, digit or sign")
    return text


def _wishes(texts: list[str]) -> tuple[Subscription, ...]:
    if len(texts) > MAX_SUBSCRIPTIONS:
        raise UserError(f"--notify is given {len(texts)} times", hint=f"give it at most {MAX_SUBSCRIPTIONS} times")
    return tuple(map(parse_subscription, texts))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def decode_asked(body: bytes) -> SubmissionRequest:
    """Not by msgspec alone: a variable that is not UTF-8 arrives with lone surrogates, which it refuses."""
    try:
        said = json.loads(body)
        if b"\\u" in body:  # other halves of letters stand for no byte, and no program can be told them
            json.dumps(said, ensure_ascii=False).encode(errors="surrogateescape")
        return msgspec.convert(said, SubmissionRequest)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the submission cannot be understood: {error}") from error
