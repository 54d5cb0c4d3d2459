"""Turns a submission into jobs: one spec that all its jobs share, and what differs between them.

Option values arrive as they were typed, from the command line, the web page or a client, and are checked here.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.command_line import read_line
from gpuyard.model.container import parse_container
from gpuyard.model.dependencies import DependencyKind
from gpuyard.model.job_spec import BatchPace, CodeRecord, DiskLimits, JobSpec, OnPreempt, OnReboot, TagSharing, Task
from gpuyard.model.lease import FixedMemory, HostShare, MemoryNeed, Need, UnknownMemory, WholeDevice, check_several
from gpuyard.model.machine_snapshot import Vendor
from gpuyard.model.option_values import Options
from gpuyard.model.placeholders import ArrayElement, check_pattern, names_host, used_names
from gpuyard.model.retry import parse_causes
from gpuyard.model.selection import JobSelection, parse_moment, parse_selection
from gpuyard.model.shell_environment import ShellSettings, Submitters
from gpuyard.model.stopping import parse_signal_option
from gpuyard.model.submit_options import SUBMIT_OPTIONS
from gpuyard.model.subscriptions import MAX_SUBSCRIPTIONS, parse_subscription
from gpuyard.model.sweep import all_points, check_placeholders, count_points, parse_axes, sample_points, varying_names

MOST_JOBS = 1_000_000
# The engine that runs jobs on this machine.
LOCAL = "local"
# The default priority of a job that preempts others: jobs of the same priority are never preempted.
URGENT = 100
_BYTE_ORDER_MARK = "\ufeff"  # spreadsheets write it before the first column's name
# The types of the fields whose option is plain text.
_FIELD_TYPES = {"vendor": Vendor, "on_preempt": OnPreempt, "on_reboot": OnReboot, "engine_options": tuple}


class SubmissionRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A submission as it is sent: a `command`, or a `list`, the text of a file with one command per line. A `table`,
    the text of a CSV file, fills in the command's {NAMES}. A `token` makes the submission count once, however often it
    is sent. `configuration` is a digest of the configuration files that the command names: estimates are learned
    separately for each. `framework` is what its script imports. `shell` is what the job takes from the shell that
    submits it; a wait without ids finds the jobs by their `submitters`. Default of `cwd`, `environment` and `shell`:
    the user's home, and those of the daemon. An option `concurrency` makes it a batch. A workspace sends a `task`, and
    `tag_sharing`, the rule by which jobs of its tag share GPUs. `code` is what was recorded of the code."""

    cwd: str = ""
    environment: dict[str, str] | None = None
    shell: ShellSettings | None = None
    token: str = ""
    configuration: str = ""
    framework: Annotated[str, Meta(max_length=40)] = ""
    command: tuple[str, ...] | None = None
    list: str | None = None
    table: str | None = None
    options: dict[str, Any] = {}
    task: Task | None = None
    tag_sharing: TagSharing | None = None
    submitters: Submitters = ()
    code: CodeRecord = CodeRecord()


class Submission(Struct, frozen=True, kw_only=True):
    """A checked submission."""

    token: str
    spec: JobSpec
    priority: int
    count: int
    elements: Iterable[ArrayElement]
    dependencies: tuple[tuple[DependencyKind, JobSelection], ...] = ()
    after_each: tuple[JobSelection, ...] = ()  # each job waits for those of these with its own index
    devices: tuple[str, ...] | None = None  # names or indexes of the GPUs it may use, not yet resolved on this machine
    group_limit: int | None = None
    is_held: bool = False
    submitters: tuple[str, ...] = ()
    at: str | None = None  # the earliest start, as a moment (`selection.py`), and as a queue time, once that is known
    not_before: float | None = None
    devices_are_optional: bool = False  # it runs without a GPU on a machine that has none


def parse_submission(request: SubmissionRequest) -> Submission:
    options = Options(request.options, SUBMIT_OPTIONS)
    engine = "" if options["engine"] in (None, LOCAL) else options["engine"]
    _check(request, options, engine)
    pace = _parse_pace(options) if "concurrency" in options else None
    fields = _parse_fields(options)
    need = _parse_need(options, fields.pop("need"), pace)
    count, elements, group_limit = _expand(request, options)
    _check_output(request, options, elements, count)
    if request.list is None:
        check_placeholders(request.command or (), options, elements)
    stagger_s, cwd, at = options["stagger"], request.cwd, options["at"]
    if stagger_s and count < 2 and pace is None:
        raise UserError(
            "--stagger is a pause between the starts of several jobs, and this is one",
            hint="give --array, --sweep or --from, or leave it out; --in delays a single job",
        )
    if at is not None:
        parse_moment(at)
    variables = dict(map(_parse_variable, options["env"]))
    spec = JobSpec(
        **fields,
        command=request.command or (),
        cwd=cwd,
        environment={**(request.environment or {}), **variables},
        need=need,
        retry_on=parse_causes(options["retry-on"], options["retries"]),
        warning=parse_signal_option(options["signal"], engine, options["time-limit"]),
        is_array=count > 1 or group_limit is not None or "array" in options,
        configuration=request.configuration,
        framework=request.framework,
        pace=pace,
        tag_sharing=request.tag_sharing,
        task=request.task,
        engine=engine,
        notify=tuple(map(parse_subscription, options["notify"])),
        container=parse_container(options["image"], options["mount"], options["container-option"], variables, cwd),
        shell=request.shell,
        stagger_s=0.0 if pace is not None else stagger_s,
        code=request.code,
        varies=varying_names(elements) if isinstance(elements, list) else (),
        filled_variables=tuple(name for name, value in variables.items() if used_names([value])),
    )
    kinds = (("after", DependencyKind.OK), ("after-any", DependencyKind.ANY), ("after-failed", DependencyKind.FAILED))
    devices = options["device"]
    priority: int | None = options["priority"]
    return Submission(
        token=request.token,
        spec=spec,
        priority=(URGENT if spec.preempts else 0) if priority is None else priority,
        count=count,
        elements=elements,
        dependencies=tuple((kind, parse_selection(text)) for name, kind in kinds for text in options[name]),
        after_each=tuple(map(parse_selection, options["after-each"])),
        devices=None if devices is None else tuple(filter(None, map(str.strip, devices.split(",")))),
        group_limit=group_limit,
        is_held=options["hold"],
        submitters=request.submitters,
        at=at,
        devices_are_optional=pace is not None and "gpus" not in options and devices is None,
    )


def _parse_fields(options: Options) -> dict[str, Any]:
    """Return the fields of the spec that have an option each, and those of its need; by the table of options."""
    found: dict[str, dict[str, Any]] = {"": {}, "need": {}, "disk": {}}
    for option in SUBMIT_OPTIONS.values():
        if option.field is not None:
            part, _, name = option.field.rpartition(".")
            value = options[option.name]
            found[part][name] = _FIELD_TYPES[name](value) if name in _FIELD_TYPES and value is not None else value
    disk = DiskLimits(**found["disk"])
    if disk.output_root is not None and not disk.output_root.startswith("/"):
        hint = "give the whole path of the folder"
        raise UserError(f"--output-root '{disk.output_root}' is not an absolute path", hint=hint)
    return {**found[""], "tag": found[""]["tag"] or "", "disk": disk, "need": found["need"]}


def _check(request: SubmissionRequest, options: Options, engine: str) -> None:
    """Refuse options that the batch or the engine does not take, and values that no job may have."""
    for option in SUBMIT_OPTIONS.values():
        if option.name not in options:
            continue
        if option.is_for_batch and "concurrency" not in options:
            raise UserError(f"--{option.name} is an option of a batch", hint="give a concurrency, or leave it out")
        if option.is_local and engine:
            raise UserError(
                f"--{option.name} is about this machine, and {engine} places the job itself",
                hint="leave it out; --engine-option passes options to the engine",
            )
    if not request.cwd.startswith("/"):
        raise UserError(f"the working directory '{request.cwd}' is not an absolute path")
    if not all(map(str.isprintable, options["engine-option"])):
        raise UserError("--engine-option takes plain text", hint="remove characters that cannot be printed")
    times = len(options["notify"])
    if times > MAX_SUBSCRIPTIONS:
        raise UserError(f"--notify is given {times} times", hint=f"give it at most {MAX_SUBSCRIPTIONS} times")
    if request.tag_sharing is not None and not options["tag"]:
        raise UserError("`tag_sharing` is the rule of a tag, and these jobs have no tag", hint="give them a tag")


def _check_output(request: SubmissionRequest, options: Options, elements: Iterable[ArrayElement], count: int) -> None:
    """Refuse files for output that do not go together, or that several jobs would share."""
    given = [name for name in ("output", "error", "split-stderr", "timestamps") if name in options]
    if given and request.task is not None:
        raise UserError(
            f"--{given[0]} is not for tasks of a workspace: their output is that of a terminal",
            hint="`enable_logging` and `log_dir` in scheduler_config.yml say where its logs are",
        )
    if "error" in options and "split-stderr" in options:
        raise UserError("--error and --split-stderr both say where standard error goes", hint="leave out one of them")
    if "log-cap" in options and "output" in options and "split-stderr" not in options:
        raise UserError(
            "--log-cap cannot be used with --output: gpuyard does not cut your own files", hint="leave out --log-cap"
        )
    shown = [ArrayElement(index=0)] if "array" in options else elements
    for name in ("output", "error"):
        if options[name] is not None:
            check_pattern(name, options[name], request.cwd, shown, is_many=count > 1)
            if options["engine"] not in (None, LOCAL) and names_host(options[name]):
                raise UserError(
                    f"--{name}: the file has to be known before {options['engine']} chooses the machine",
                    hint="leave out %N and {host}; %j or {job} is the job's id",
                )


def _parse_pace(options: Options) -> BatchPace:
    """Return the load gates of a batch: they take the bounds that a single job has in its need."""
    if "ram" in options:
        raise UserError("--ram is not an option of a batch", hint="give --run-ram, the RAM of one run")
    vram_mb, most_mb = options["vram"], options["max-gpu-mem-mb"]
    if vram_mb is not None and most_mb is not None and vram_mb > most_mb:
        raise UserError(
            f"a run takes {vram_mb:.0f} MB of a GPU (--run-vram), and no more than {most_mb:.0f} MB may be used "
            "(--max-gpu-mem-mb)",
            hint="raise --max-gpu-mem-mb, or no run can ever start",
        )
    return BatchPace(
        max_cpu_percent=options["max-cpu"],
        min_free_memory_mb=options["min-free-mem-mb"],
        max_gpu_percent=options["max-gpu"],
        max_gpu_memory_mb=most_mb,
        run_ram_mb=options["run-ram"],
        smoothing_s=options["smoothing"],
        steady_s=options["steady"],
        stagger_s=options["stagger"],
        sample_log=options["sample-log"],
    )


def _parse_need(options: Options, fields: dict[str, Any], pace: BatchPace | None) -> Need:
    """`fields` are those of the need that have an option each."""
    gpus, vram_mb, is_exclusive, model = options["gpus"], options["vram"], options["exclusive"], options["gpu-name"]
    if model is not None and not model.isprintable():
        raise UserError("--gpu-name takes plain text", hint="a part of the GPU's name, such as H100")
    names_gpu = "device" in options and not (pace is not None and pace.gates_devices)  # such a batch only watches it
    if gpus == 0 and (vram_mb is not None or is_exclusive or options["vendor"] or model or names_gpu):
        raise UserError("--gpus 0 asks for no GPU, and other options for one", hint="leave out one or the other")
    if gpus == 0 and options["preempt"]:
        raise UserError("--preempt takes GPUs from others, and --gpus 0 asks for none", hint="leave out one of them")
    check_several(gpus, "--gpus 2", [f"--{name}" for name in ("linked", "same-node") if options[name]])
    if pace is not None:  # its gates have these bounds
        bounds = ("max_utilization_percent", "max_memory_used_mb", "max_cpu_percent", "min_host_memory_mb")
        fields = {name: value for name, value in fields.items() if name not in bounds}
    share = HostShare(ram_mb=options["ram" if pace is None else "run-ram"], cpus=options["cpus"])
    memory: MemoryNeed = UnknownMemory() if vram_mb is None else FixedMemory(vram_mb)
    if is_exclusive or gpus == 0:
        memory = WholeDevice(vram_mb)
    return Need(**fields, memory=memory, host=None if share == HostShare() else share)


def _expand(request: SubmissionRequest, options: Options) -> tuple[int, Iterable[ArrayElement], int | None]:
    """Return the number of jobs, the jobs, and how many of them may run at once."""
    array: str | None = options["array"]
    sources = {
        "--array": array is not None,
        "--sweep": bool(options["sweep"]),
        "--from": request.list is not None or request.table is not None,
    }
    given = [source for source, is_given in sources.items() if is_given]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} do not go together", hint="submit them one after the other")
    for name, needed in (("sample", "sweep"), ("seed", "sample")):
        if name in options and needed not in options:
            raise UserError(f"--{name} goes with --{needed}", hint=f"give --{needed}, or leave out --{name}")
    if request.list is None and not request.command:
        raise UserError("there is no program to run", hint="write it last: gpuyard submit -- python train.py")
    if request.list is not None and request.command:
        raise UserError("a list of commands goes with no program", hint="a CSV file's columns fill in one")
    if array is not None:
        if "concurrency" in options:
            raise UserError("a batch is no array", hint="write --array 0-99%8 instead of a concurrency of 8")
        return _expand_array(array)
    found = list(_expand_list(request, options))
    _refuse_too_many(len(found))
    at_once: int | None = options["concurrency"]
    if at_once is not None:  # a column `index` identifies a run of a batch
        indexes = (each.values.get("index", "") for each in found)
        found = [
            replace(each, index=int(index)) if index.isascii() and index.isdecimal() else each
            for each, index in zip(found, indexes, strict=True)
        ]
    return len(found), found, at_once


def _expand_list(request: SubmissionRequest, options: Options) -> Iterable[ArrayElement]:
    if request.list is not None:
        return _expand_lines(request.list.removeprefix(_BYTE_ORDER_MARK))
    if request.table is not None:
        return _expand_rows(request.table.removeprefix(_BYTE_ORDER_MARK))
    if not options["sweep"]:
        return (ArrayElement(),)
    axes, sample = parse_axes(options["sweep"]), options["sample"]
    if sample is None:
        _refuse_too_many(count_points(axes), ", or a random part of them with --sample")
    points = all_points(axes) if sample is None else sample_points(axes, sample, options["seed"])
    return (ArrayElement(values=point) for point in points)


def _expand_array(text: str) -> tuple[int, Iterable[ArrayElement], int | None]:
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})(?::(\d{1,9}))?(?:%(\d{1,9}))?", text.strip(), re.ASCII)
    if match is None:
        raise UserError(f"'{text}' is not a range for --array", hint="write it as 0-99, 0-99:5 or 0-99%8")
    first, last = int(match[1]), int(match[2])
    step, limit = (None if group is None else int(group) for group in match.group(3, 4))
    if step == 0 or limit == 0 or last < first:
        raise UserError(f"'{text}' is an empty range for --array", hint="write it as 0-99, 0-99:5 or 0-99%8")
    indexes = range(first, last + 1, step or 1)
    _refuse_too_many(len(indexes))
    return len(indexes), (ArrayElement(index=index) for index in indexes), limit


def _refuse_too_many(count: int, otherwise: str = "") -> None:
    if count > MOST_JOBS:
        raise UserError(f"{count:,} jobs at once are too many", hint=f"submit at most {MOST_JOBS:,}{otherwise}")


def _expand_lines(text: str) -> Iterator[ArrayElement]:
    lines = [line.strip() for line in text.split("\n")]  # only newlines separate commands, as in a shell
    commands = [line for line in lines if line and not line.startswith("#")]
    if not commands:
        raise UserError("the file has no command in it", hint="write one per line; lines that start with # are skipped")
    for line in commands:
        yield ArrayElement(command=read_line(line))


def _expand_rows(text: str) -> Iterator[ArrayElement]:
    rows = csv.reader(io.StringIO(text), strict=True)
    try:
        names = [name.strip() for name in next(rows, [])]
        bad = next((name for name in names if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)), None)
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


def _parse_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UserError("--env takes NAME=VALUE", hint="write it as --env LR=3e-4")  # the text may be a secret
    return name, value
