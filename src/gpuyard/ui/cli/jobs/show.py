"""`gpuyard show`: all details of a job."""

from gpuyard.model.option import Option
from gpuyard.model.units import (
    UNKNOWN,
    format_count,
    format_cpu_numbers,
    format_duration,
    format_energy,
    format_size,
    format_time,
)
from gpuyard.ui.cli.ask_daemon import show_each
from gpuyard.ui.cli.command_grammar import IDS_HELP, JSON, SEVERAL, Answer, Typed, Verb
from gpuyard.ui.cli.jobs.job_text import cost_texts, figures_text, gpu_text, progress_text, result_text, where_text
from gpuyard.ui.cli.terminal import paint, terminal_size
from gpuyard.ui.cli.text_table import clean, join_cells, lay_out, make_columns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

VERB = Verb(
    "Show all details of a job: its command, its needs, and each attempt with the memory it used.\n\n"
    f"Shows only the names of environment variables, since values may be secrets. {IDS_HELP}",
    (Option("environment", "flag", None, "Show the values of environment variables too."), JSON),
    SEVERAL,
)
_ATTEMPTS = make_columns(
    "ATTEMPT", "PID", "STARTED", "ENDED", "DEVICES", "RESULT",
    right=("ATTEMPT", "PID"), long=("DEVICES", "RESULT"), spare=("PID", "ENDED"),
)  # fmt: skip


def run(typed: Typed) -> int:
    query = {"environment": "1"} if typed.flag("environment") else None
    return show_each(typed, "", _lines, query)


def _lines(job: Answer) -> "Iterator[str]":
    yield from fact_lines(job)
    yield from (paint(line, style) if style else line for line, style in sections(job, terminal_size()[0]))


def sections(job: Answer, width: int | None) -> "Iterator[tuple[str, str | None]]":
    """Yield the lines below the facts, each with its style: attempts, what clusters were sent, memory, advice."""
    cells = []
    for attempt in job["attempts"]:
        result = result_text(attempt) if attempt["lack"] is None else "out of memory"  # with details below
        cells.append((
            str(attempt["number"]),
            UNKNOWN if attempt["pid"] is None else str(attempt["pid"]),
            format_time(attempt["started_at"]),
            format_time(attempt["ended_at"]),
            attempt["place"] or ",".join(gpu_text(device, job, "") for device in attempt["devices"]) or UNKNOWN,
            job["state"] if attempt["ended_at"] is None else result,
        ))  # fmt: skip
    heading, *lines = (join_cells(line) for line in lay_out(_ATTEMPTS, cells, width))
    if lines:
        yield from (("", None), (heading, "dim"))
    for attempt in job["attempts"]:
        if (sent := attempt["request"]) is not None:
            lines += ["", f"attempt {attempt['number']} was sent to {attempt['engine']} as: {clean(sent['text'])}"]
            lines += [f"  {name}: {clean(origin)}" for name, origin in sent["origins"].items()]
    lines += _memory_lines(job, width)
    for text in job["advice"]:
        lines += ["", f"note: {clean(text)}"]
    yield from ((line, None) for line in lines)


def fact_lines(job: Answer) -> list[str]:
    """Return `name: value` lines in the order in which people look for them, without options that were not given."""
    ended, host = job["ended_at"] is not None, job["need"].get("host") or {}
    ram_mb, retries, not_before, code = host.get("ram_mb"), job["retries"], job["not_before"], job["code"]
    before = {
        "job": str(job["id"]),
        "name": job["name"],
        "state": job["state"],
        "why": None if ended else job["reason"],
        "result": result_text(job) if ended else None,
        "command": job["command"],
        "resubmitted from": f"job {job['resubmitted_from']}" if job.get("resubmitted_from") else None,
        "directory": job["cwd"],
        "code": code["text"],
        "script": code["script"],
        "snapshot": "removed" if code["snapshot"] and not code["snapshot_exists"] else code["snapshot"],
        "container": _container(job.get("container")),
        "array": None if job["array"] is None else str(job["array"]),
        "index": None if job["index"] is None else str(job["index"]),
        "values": ", ".join(f"{name}={value}" for name, value in job["values"].items()),
        "user": job["user"],
        "priority": str(job["priority"]),
        "engine": _engine(job),
        "GPUs": where_text(job),
        "memory": job["memory"] and _memory(job["memory"], job["growth"]),
        "RAM": None if ram_mb is None else format_size(ram_mb),
    }
    after = {
        "after": ", ".join(
            f"{each['id']}{'' if each['kind'] == 'ok' else ' (' + each['kind'] + ')'} "
            f"{'met' if each['met'] else 'is ' + each['state']}"
            for each in job["after"]
        ),
        "submitted": format_time(job["submitted_at"]),
        "started": job["started_at"] and format_time(job["started_at"]),
        "ended": job["ended_at"] and format_time(job["ended_at"]),
        "elapsed": None if job["elapsed_s"] is None else format_duration(job["elapsed_s"]),
        "progress": progress_text(job),
        "figures": figures_text(job),
        "energy": _energy(job.get("energy")),
        "signal before it is stopped": job["signal"],
        # The failure of the first attempt uses no retry.
        "retries": f"{min(job['failures'], retries)} of {retries} used" if retries else None,
        # A job that is retried after all causes, the default, does not list them.
        "retried after": None if len(job["retry_on"]) == 4 else ", ".join(job["retry_on"]),
        "next attempt": job["due_at"] and job["due_at"] != not_before and format_time(job["due_at"]),
        "not before": format_time(not_before) if not_before else None,
        "notify": "; ".join(
            f"{each['target'] or 'as configured'} on {', '.join(each['events'])}" for each in job.get("notify", ())
        ),
        "log": job["log"],
        "standard error": job["attempts"][-1]["error_log"] if job["attempts"] else None,
        "error": job["error_output"],
    }
    options = {name: text for name, text in _option_facts(job).items() if name not in before and name not in after}
    shown = [(name, value) for name, value in {**before, **options, **after}.items() if value]
    values = job["environment"]
    if values is None:
        shown.append(("environment", " ".join(sorted(job["environment_names"]))))
    else:
        shown += [("environment", f"{name}={value}") for name, value in sorted(values.items())]
    shown += [("dropped", " ".join(job["dropped"]))] if job["dropped"] else []
    return [f"{name}: {clean(value)}" for name, value in shown]


def _option_facts(job: Answer) -> dict[str, str]:
    """Return the lines that the table of options makes: of the options with a field, what is not the default."""
    from gpuyard.model.option_values import Options
    from gpuyard.model.submit_options import SUBMIT_OPTIONS

    found: dict[str, list[str]] = {}
    defaults = Options({}, SUBMIT_OPTIONS)
    for option in SUBMIT_OPTIONS.values():
        value: Any = job if option.field and option.shown else None
        for name in (option.field or "").split("."):
            value = None if value is None else value.get(name)
        if value not in (None, "", defaults[option.name]):
            text = option.text.format(value) if option.text else _WRITTEN.get(option.kind, str)(value)
            found.setdefault(option.shown, []).append(text)
    return {name: ", ".join(texts) for name, texts in found.items()}


# How a value is written, by the kind of its option.
_WRITTEN: "dict[str, Callable[[Any], str]]" = {"size": format_size, "time": format_duration, "texts": ", ".join}


def _memory(memory: Answer, growth: Answer | None) -> str:
    """Return the memory that the next attempt gets on each GPU, and where that figure comes from."""
    given, runs = memory["given_mb"], memory["runs"]
    size = "alone" if given is None else format_size(given) + (", alone" if memory["alone"] else "")
    if memory["basis"] == "grown" and growth is not None:
        times = {1: "once", 2: "twice"}.get(growth["count"]) or format_count(growth["count"], "time")
        return f"{size} (it ran out of memory {times})"
    if memory["basis"] == "unknown":
        return f"{size} until it has shown what it needs (no estimate yet)"
    if memory["basis"] == "declared":
        return size
    arguments = "" if memory["same_command"] else " with other arguments"
    return f"{'' if given is None else 'learned '}{size} (from {format_count(runs, 'run')}{arguments})"


def _engine(job: Answer) -> str | None:
    if job.get("engine", "local") == "local":
        return None
    last = job["attempts"][-1] if job["attempts"] else {"site_id": None, "place": None}
    where = f", on {last['place']}" if last["place"] else ""
    return f"{job['engine']}{' ' + last['site_id'] if last['site_id'] else ''}{where}"


def _container(container: Answer | None) -> str | None:
    if container is None:
        return None
    mounts = [
        f"{each['source']} at {each['target']}{' (read-only)' if each['is_read_only'] else ''}"
        for each in container["mounts"]
    ]
    return ", ".join([f"{container['image']} ({container['tool']})", *mounts, *container["options"]])


# The memory of attempts

# Lines of the chart, and columns before it.
_ROWS, _MARGIN = 3, 2


def _memory_lines(job: Answer, width: int | None) -> "Iterator[str]":
    for attempt in job["attempts"]:
        figures = list(_figures(attempt, job))
        if not figures and attempt["lack"] is None:
            continue
        yield ""
        yield f"attempt {attempt['number']}: {', '.join(figures)}"
        for line in _chart(attempt, width or 80):
            yield f"{' ' * _MARGIN}{line}".rstrip()
        if attempt["lack"] is not None:
            is_last = attempt is job["attempts"][-1]
            yield from _lack_lines(attempt["lack"], job if is_last else None)


def _figures(attempt: Answer, job: Answer) -> "Iterator[str]":
    reserved, predicted, peaks = attempt["reserved_mb"], attempt["predicted_mb"], attempt["peaks_mb"]
    if attempt["devices"]:
        yield "alone" if reserved is None else f"reserved {format_size(reserved)}"
    if predicted is not None:
        yield f"predicted {format_size(predicted)}"
    for device, peak in sorted(peaks.items()):
        yield f"peak {format_size(peak)}{f' on {gpu_text(device, job)}' if len(peaks) > 1 else ''}"
    for key, text in (("ram_mb", lambda mb: f"RAM {format_size(mb)}"), ("cpus_used", "{:.1f} CPUs busy".format)):
        if attempt[key] is not None:
            yield text(attempt[key])
    if attempt["cpus"]:
        yield f"CPUs {format_cpu_numbers(attempt['cpus'])}"
    if attempt["load_percent"] is not None:
        yield f"load {attempt['load_percent']:.0f}%"
    if attempt["energy"] is not None:
        yield energy_text(attempt["energy"])
    if attempt["suspended_s"]:
        yield f"suspended for {format_duration(attempt['suspended_s'])}"


def energy_text(energy: Answer) -> str:
    """Return the energy with what it cost, such as `0.42 kWh (0.13 EUR, 147 g CO2e)`."""
    costs = cost_texts(energy, energy["co2e_g"])
    return format_energy(energy["joules"]) + (f" ({', '.join(costs)})" if costs else "")


def _energy(energy: Answer | None) -> str | None:
    if energy is None:
        return None
    power = "" if energy["mean_w"] is None else f", {energy['mean_w']:.0f} W per GPU on average"
    idle = f", idle for {format_duration(energy['idle_s'])}" if energy["idle_s"] >= 1 else ""
    # Nothing to say of the card's own counter, alone on the card.
    bases = {"counter": "", "shared": " (its part of shared GPUs)", "power": " (from the power of the GPUs)"}
    return f"{energy_text(energy)}{power}{idle}{bases[energy['basis']]}"


def _chart(attempt: Answer, width: int) -> list[str]:
    """Return the curve with its axes; no lines if it has fewer than two points or no memory was used."""
    points = attempt["curve"]
    if len(points) < 2 or not any(used for _, used in points):
        return []
    labels = [format_size(max(used for _, used in points)), *[""] * (_ROWS - 1)]
    label_width = len(labels[0])
    columns = min(120, width - label_width - _MARGIN - 2)  # the daemon keeps at most 120 points of a curve
    if columns < 10:
        return []
    rows = draw(points, attempt["ran_s"], columns, _ROWS)
    lines = [f"{label:>{label_width}} │{row}" for label, row in zip(labels, rows, strict=True)]
    end = format_duration(max(attempt["ran_s"], points[-1][0]))
    lines.append(f"{'0':>{label_width}} └{'─' * columns}")
    lines.append(f"{'':>{label_width}}  0s{end:>{columns - 2}}")
    return lines


def draw(points: "Sequence[Sequence[float]]", seconds: float, width: int, rows: int) -> list[str]:
    """Return `rows` lines of `width` characters, the top one first. `points` are pairs of seconds and MB. Each column
    shows the maximum of its interval; an interval without a measurement repeats the value before it."""
    levels = " ▁▂▃▄▅▆▇█"
    steps, seconds = len(levels) - 1, max(seconds, points[-1][0])
    intervals: list[list[float]] = [[] for _ in range(width)]
    for at, used in points:
        intervals[min(width - 1, int(at / seconds * width)) if seconds else 0].append(used)
    columns, before = [], 0.0
    for values in intervals:
        columns.append(max(values, default=before))
        before = values[-1] if values else before
    most = max(columns) or 1.0
    # A value above zero is always visible.
    heights = [max(1, round(value / most * rows * steps)) if value else 0 for value in columns]
    return [
        "".join(levels[min(steps, max(0, height - row * steps))] for height in heights) for row in reversed(range(rows))
    ]


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
