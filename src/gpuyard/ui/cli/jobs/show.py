"""`gpuyard show`: all details of a job."""

from gpuyard.model.option import Option
from gpuyard.model.units import (
    UNKNOWN,
    format_co2e,
    format_count,
    format_cpu_numbers,
    format_duration,
    format_energy,
    format_money,
    format_size,
    format_time,
)
from gpuyard.ui.cli.ask_daemon import show_each
from gpuyard.ui.cli.command_grammar import IDS_HELP, JSON, SEVERAL, Answer, Typed, Verb
from gpuyard.ui.cli.jobs.job_text import figures_text, gpu_text, progress_text, result_text, where_text
from gpuyard.ui.cli.terminal import ellipsis, is_unicode, paint, terminal_size
from gpuyard.ui.cli.text_table import Column, clean, join_cells, lay_out

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any


def code_facts(code: "Mapping[str, Any] | None") -> "list[tuple[str, str | None]]":
    """Return the facts about a job's code; none from a daemon that does not know them."""
    if code is None:
        return []
    snapshot = code["snapshot"]
    is_gone = snapshot is not None and not code["snapshot_exists"]
    return [("code", code["text"]), ("script", code["script"]), ("snapshot", "removed" if is_gone else snapshot)]


VERB = Verb(
    "Show all details of a job: its command, its needs, and each attempt with the memory it used.\n\n"
    f"Shows only the names of environment variables, since values may be secrets. {IDS_HELP}",
    (Option("environment", "flag", None, "Show the values of environment variables too."), JSON),
    SEVERAL,
)
_ATTEMPTS = (
    Column("ATTEMPT", is_right=True),
    Column("PID", is_right=True, is_spare=True),
    Column("STARTED"),
    Column("ENDED", is_spare=True),
    Column("DEVICES", is_long=True),
    Column("RESULT", is_long=True),
)
# The limits on the machine and on its GPUs that were submitted with a job.
_BOUNDS = {
    "vendor": "{} GPUs",
    "model": "GPUs named {}",
    "is_linked": "GPUs joined by NVLink or XGMI",
    "is_on_one_node": "GPUs of one NUMA node",
    "max_utilization_percent": "GPU use up to {:g}%",
    "max_memory_used_mb": "GPU memory used up to {:g} MB",
    "max_power_w": "power up to {:g} W",
    "max_cpu_percent": "CPU use up to {:g}%",
    "min_host_memory_mb": "at least {:g} MB of RAM available",
}
_TIMES = {1: "once", 2: "twice"}
# A job that is retried after all of these, the default, does not list them.
_CAUSES = ("failed", "timeout", "oom", "device")
# How the energy was measured; by the card's own counter, alone on the card, is nothing to mention.
_BASES = {"counter": "", "shared": " (its part of shared GPUs)", "power": " (from the power of the GPUs)"}
# The chart of an attempt's memory.
_ROWS = 3
_MARGIN = 2
_WIDTH_IN_A_PIPE = 80
# The daemon keeps at most this many points of a curve.
_WIDEST = 120
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAIN = " .:#"


def run(typed: Typed) -> int:
    query = {"environment": "1"} if typed.flag("environment") else None
    return show_each(typed, "", _lines, query)


def _lines(job: Answer) -> "Iterator[str]":
    width = terminal_size()[0]
    yield from fact_lines(job)
    heading, *attempts = attempt_lines(job, width, ellipsis())
    if attempts:
        yield from ("", paint(heading, "dim"), *attempts)
    yield from request_lines(job)
    yield from memory_lines(job, width, is_unicode=is_unicode())
    yield from advice_lines(job)


def _host_text(host: "Mapping[str, float] | None", key: str, write: "Callable[[float], str]") -> str | None:
    return write(host[key]) if host and host.get(key) is not None else None


def attempt_lines(job: Answer, width: int | None, ellipsis: str) -> list[str]:
    cells = [_attempt_cells(attempt, job) for attempt in job["attempts"]]
    return [join_cells(line) for line in lay_out(_ATTEMPTS, cells, width, ellipsis)]


def advice_lines(job: Answer) -> "Iterator[str]":
    for text in job["advice"]:
        yield ""
        yield f"note: {clean(text)}"


def _is_given(limit: object) -> bool:
    return limit is not None and limit is not False


def fact_lines(job: Answer) -> list[str]:
    """Return `name: value` lines in the order in which people look for them, without options that were not given."""
    need, notify = job["need"], job.get("notify", ())
    facts = [
        ("job", str(job["id"])),
        ("name", job["name"]),
        ("state", job["state"]),
        ("why", job["reason"] if job["ended_at"] is None else None),
        ("result", result_text(job) if job["ended_at"] is not None else None),
        ("command", job["command"]),
        ("resubmitted from", f"job {job['resubmitted_from']}" if job.get("resubmitted_from") else None),
        ("directory", job["cwd"]),
        *code_facts(job.get("code")),
        ("container", _container(job)),
        ("standard input", job["stdin"]),
        ("array", None if job["array"] is None else str(job["array"])),
        ("index", None if job["index"] is None else str(job["index"])),
        ("values", ", ".join(f"{name}={value}" for name, value in job["values"].items())),
        ("tag", job["tag"]),
        ("user", job["user"]),
        ("priority", str(job["priority"])),
        ("engine", _engine(job)),
        ("GPUs", where_text(job)),
        ("memory", job["memory"] and _memory(job["memory"], job["growth"])),
        ("RAM", _host_text(need.get("host"), "ram_mb", format_size)),
        ("CPUs", _host_text(need.get("host"), "cpus", "{:g}".format)),
        ("limits", ", ".join(text.format(need[key]) for key, text in _BOUNDS.items() if _is_given(need.get(key)))),
        ("after", ", ".join(map(_after_text, job["after"]))),
        ("submitted", format_time(job["submitted_at"])),
        ("started", job["started_at"] and format_time(job["started_at"])),
        ("ended", job["ended_at"] and format_time(job["ended_at"])),
        ("elapsed", None if job["elapsed_s"] is None else format_duration(job["elapsed_s"])),
        ("progress", progress_text(job, is_unicode=is_unicode())),
        ("figures", figures_text(job)),
        ("energy", _energy(job)),
        ("time limit", None if job["time_limit_s"] is None else format_duration(job["time_limit_s"])),
        ("signal before it is stopped", job["signal"]),
        ("expected duration", None if job["duration_s"] is None else format_duration(job["duration_s"])),
        # The failure of the first attempt uses no retry.
        ("retries", f"{min(job['failures'], job['retries'])} of {job['retries']} used" if job["retries"] else None),
        ("retried after", None if len(job["retry_on"]) == len(_CAUSES) else ", ".join(job["retry_on"])),
        ("next attempt", job["due_at"] and job["due_at"] != job.get("not_before") and format_time(job["due_at"])),
        ("not before", format_time(job["not_before"]) if job.get("not_before") else None),
        ("after a reboot", job["on_reboot"]),
        ("preempts", "jobs of lower priority" if job["preempts"] else None),
        ("if preempted", None if job["on_preempt"] == "suspend" else job["on_preempt"]),
        ("notify", "; ".join(f"{each['target'] or 'as configured'} on {', '.join(each['events'])}" for each in notify)),
        ("log", job["log"]),
        ("standard error", job["attempts"][-1]["error_log"] if job["attempts"] else None),
        ("output", job["output"]),
        ("error", job["error_output"]),
    ]
    shown = [(name, value) for name, value in facts if value] + _environment(job)
    return [f"{name}: {clean(value)}" for name, value in shown]


def _memory(memory: Answer, growth: Answer | None) -> str:
    """Return the memory that the next attempt gets on each GPU, and where that figure comes from."""
    given, runs = memory["given_mb"], memory["runs"]
    size = "alone" if given is None else format_size(given) + (", alone" if memory["alone"] else "")
    if memory["basis"] == "grown" and growth is not None:
        return f"{size} (it ran out of memory {_TIMES.get(growth['count']) or format_count(growth['count'], 'time')})"
    if memory["basis"] == "unknown":
        return f"{size} until it has shown what it needs (no estimate yet)"
    if memory["basis"] == "declared":
        return size
    arguments = "" if memory["same_command"] else " with other arguments"
    return f"{'' if given is None else 'learned '}{size} (from {format_count(runs, 'run')}{arguments})"


def _engine(job: Answer) -> str | None:
    if job.get("engine", "local") == "local":
        return None
    attempts = job["attempts"]
    last = attempts[-1] if attempts else {"site_id": None, "place": None}
    where = f", on {last['place']}" if last["place"] else ""
    return f"{job['engine']}{' ' + last['site_id'] if last['site_id'] else ''}{where}"


def _container(job: Answer) -> str | None:
    container = job.get("container")
    if container is None:
        return None
    mounts = [f"{each['source']} at {each['target']}{' (read-only)' if each['is_read_only'] else ''}"
              for each in container["mounts"]]  # fmt: skip
    return ", ".join([f"{container['image']} ({container['tool']})", *mounts, *container["options"]])


def _after_text(dependency: Answer) -> str:
    kind = "" if dependency["kind"] == "ok" else f" ({dependency['kind']})"
    return f"{dependency['id']}{kind} {'met' if dependency['met'] else 'is ' + dependency['state']}"


def _environment(job: Answer) -> "list[tuple[str, str]]":
    values, dropped = job["environment"], job["dropped"]
    return _variables(job, values) + ([("dropped", " ".join(dropped))] if dropped else [])


def _variables(job: Answer, values: "dict[str, str] | None") -> "list[tuple[str, str]]":
    if values is None:
        return [("environment", " ".join(sorted(job["environment_names"])))]
    return [("environment", f"{name}={value}") for name, value in sorted(values.items())]


def _attempt_cells(attempt: Answer, job: Answer) -> list[str]:
    # memory_lines prints the details of "out of memory".
    result = result_text(attempt) if attempt["lack"] is None else "out of memory"
    return [
        str(attempt["number"]),
        UNKNOWN if attempt["pid"] is None else str(attempt["pid"]),
        format_time(attempt["started_at"]),
        format_time(attempt["ended_at"]),
        attempt["place"] or ",".join(gpu_text(device, job, "") for device in attempt["devices"]) or UNKNOWN,
        job["state"] if attempt["ended_at"] is None else result,
    ]


def request_lines(job: Answer) -> "Iterator[str]":
    for attempt in job["attempts"]:
        if attempt["request"] is not None:
            yield ""
            yield f"attempt {attempt['number']} was sent to {attempt['engine']} as: {clean(attempt['request']['text'])}"
            for name, origin in attempt["request"]["origins"].items():
                yield f"  {name}: {clean(origin)}"


# The memory of attempts


def memory_lines(job: Answer, width: int | None, *, is_unicode: bool) -> "Iterator[str]":
    for attempt in job["attempts"]:
        figures = _figures(attempt, job)
        if not figures and attempt["lack"] is None:
            continue
        yield ""
        yield f"attempt {attempt['number']}: {', '.join(figures)}"
        for line in _chart(attempt, width or _WIDTH_IN_A_PIPE, is_unicode=is_unicode):
            yield f"{' ' * _MARGIN}{line}".rstrip()
        if attempt["lack"] is not None:
            is_last = attempt is job["attempts"][-1]
            yield from _lack_lines(attempt["lack"], job if is_last else None)


def _figures(attempt: Answer, job: Answer) -> list[str]:
    reserved, predicted, peaks = attempt["reserved_mb"], attempt["predicted_mb"], attempt["peaks_mb"]
    figures = []
    if attempt["devices"]:
        figures.append("alone" if reserved is None else f"reserved {format_size(reserved)}")
    if predicted is not None:
        figures.append(f"predicted {format_size(predicted)}")
    for device, peak in sorted(peaks.items()):
        figures.append(f"peak {format_size(peak)}{f' on {gpu_text(device, job)}' if len(peaks) > 1 else ''}")
    figures += _host_figures(attempt)
    if attempt["load_percent"] is not None:
        figures.append(f"load {attempt['load_percent']:.0f}%")
    if attempt["energy"] is not None:
        figures.append(energy_text(attempt["energy"]))
    if attempt["suspended_s"]:
        figures.append(f"suspended for {format_duration(attempt['suspended_s'])}")
    return figures


def _host_figures(attempt: Answer) -> "Iterator[str]":
    if attempt["ram_mb"] is not None:
        yield f"RAM {format_size(attempt['ram_mb'])}"
    if attempt["cpus_used"] is not None:
        yield f"{attempt['cpus_used']:.1f} CPUs busy"
    if attempt["cpus"]:
        yield f"CPUs {format_cpu_numbers(attempt['cpus'])}"


def energy_text(energy: Answer) -> str:
    """Return the energy with what it cost, such as `0.42 kWh (0.13 EUR, 147 g CO2e)`."""
    costs = []
    if energy["cost"] is not None:
        costs.append(format_money(energy["cost"], clean(energy["currency"])))
    if energy["co2e_g"] is not None:
        costs.append(format_co2e(energy["co2e_g"]))
    return format_energy(energy["joules"]) + (f" ({', '.join(costs)})" if costs else "")


def _energy(job: Answer) -> str | None:
    energy = job.get("energy")
    if energy is None:
        return None
    power = "" if energy["mean_w"] is None else f", {energy['mean_w']:.0f} W per GPU on average"
    idle = f", idle for {format_duration(energy['idle_s'])}" if energy["idle_s"] >= 1 else ""
    return f"{energy_text(energy)}{power}{idle}{_BASES[energy['basis']]}"


def _chart(attempt: Answer, width: int, *, is_unicode: bool) -> list[str]:
    """Return the curve with its axes; no lines if it has fewer than two points or no memory was used."""
    points = attempt["curve"]
    if len(points) < 2 or not any(used for _, used in points):
        return []
    labels = [format_size(max(used for _, used in points)), *[""] * (_ROWS - 1)]
    label_width = max(map(len, labels))
    upright, corner, flat = ("│", "└", "─") if is_unicode else ("|", "+", "-")
    columns = min(_WIDEST, width - label_width - _MARGIN - 2)
    if columns < 10:
        return []
    rows = draw(points, attempt["ran_s"], columns, _ROWS, is_unicode=is_unicode)
    lines = [f"{label:>{label_width}} {upright}{row}" for label, row in zip(labels, rows, strict=True)]
    end = format_duration(max(attempt["ran_s"], points[-1][0]))
    lines.append(f"{'0':>{label_width}} {corner}{flat * columns}")
    lines.append(f"{'':>{label_width}}  0s{end:>{columns - 2}}")
    return lines


def draw(points: "Sequence[Sequence[float]]", seconds: float, width: int, rows: int, *, is_unicode: bool) -> list[str]:
    """Return `rows` lines of `width` characters, the top one first. `points` are pairs of seconds and MB.

    Each column shows the maximum of its interval; an interval without a measurement repeats the value before it.
    """
    levels = _BLOCKS if is_unicode else _PLAIN
    steps = len(levels) - 1
    columns = _columns(points, max(seconds, points[-1][0]), width)
    most = max(columns) or 1.0
    # A value above zero is always visible.
    heights = [max(1, round(value / most * rows * steps)) if value else 0 for value in columns]
    return [
        "".join(levels[min(steps, max(0, height - row * steps))] for height in heights) for row in reversed(range(rows))
    ]


def _columns(points: "Sequence[Sequence[float]]", seconds: float, width: int) -> list[float]:
    intervals: list[list[float]] = [[] for _ in range(width)]
    for at, used in points:
        intervals[min(width - 1, int(at / seconds * width)) if seconds else 0].append(used)
    columns, before = [], 0.0
    for values in intervals:
        columns.append(max(values, default=before))
        before = values[-1] if values else before
    return columns


def _lack_lines(lack: Answer, job: Answer | None) -> "Iterator[str]":
    """Yield how much memory was needed and available, who held the rest, and for the last attempt what happens next."""
    is_device = lack["where"] == "device"
    needed = f"needed {format_size(lack['needed_mb'])}" if lack["needed_mb"] is not None else "needed more"
    had = lack["had_mb"] if lack["had_mb"] is not None else lack["held_mb"]
    had_text = "" if had is None else f", had {format_size(had)}"
    yield f"  {'out of memory' if is_device else 'out of RAM'}: {needed}{had_text}"
    others = [
        other["who"] + ("" if other["memory_mb"] is None else f" {format_size(other['memory_mb'])}")
        for other in lack["others"]
    ]
    details = {
        "this job": _sizes(lack, held_mb="held {}", asked_mb="requested {} more"),
        "GPU" if is_device else "RAM": _sizes(lack, free_mb="{} free", total_mb="{} in total"),
        "held by others": "; ".join(others),
        "error message": lack["says"],
        "next": None if job is None else _next_step(job),
    }
    for name, text in details.items():
        if text:
            yield f"    {name}: {clean(text)}"


def _sizes(lack: Answer, **texts: str) -> str:
    return ", ".join(text.format(format_size(lack[key])) for key, text in texts.items() if lack[key] is not None)


def _next_step(job: Answer) -> str | None:
    """Return what the retry of an unfinished job gets, or None if there is no retry."""
    growth = job["growth"]
    if growth is None or job["ended_at"] is not None:
        return None
    if growth["alone"]:
        return "retry alone on the largest GPU"
    if growth["memory_mb"] is not None:
        return f"retry with {format_size(growth['memory_mb'])}"
    return "retry" if growth["ram_mb"] is None else f"retry with {format_size(growth['ram_mb'])} of RAM"
