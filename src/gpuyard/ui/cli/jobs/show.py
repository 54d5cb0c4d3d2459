"""`gpuyard show`: all details of a job."""

from gpuyard.core.units import UNKNOWN, format_count, format_duration, format_size, format_time
from gpuyard.ui.cli.jobs.attempt_text import memory_lines
from gpuyard.ui.cli.jobs.job_text import devices_text, result_text
from gpuyard.ui.cli.select_jobs import show_each
from gpuyard.ui.cli.terminal import ellipsis, is_unicode, paint, say, terminal_size
from gpuyard.ui.cli.text_table import Column, clean, join_cells, lay_out
from gpuyard.ui.cli.verb_options import IDS, JSON, SEVERAL, Option, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

VERB = Verb(
    "Show all details of a job: its command, its needs, and each attempt with the memory it used.\n\n"
    f"Shows only the names of environment variables, since values may be secrets. IDS are {IDS}.",
    (Option("environment", None, "Show the values of environment variables too."), JSON),
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
_BOUNDS = {
    "vendor": "{} GPUs",
    "model": "GPUs named {}",
    "max_utilization_percent": "GPU use up to {:g}%",
    "max_memory_used_mb": "GPU memory used up to {:g} MB",
    "max_power_w": "power up to {:g} W",
    "max_cpu_percent": "CPU use up to {:g}%",
    "min_host_memory_mb": "at least {:g} MB of RAM available",
}
_TIMES = {1: "once", 2: "twice"}


def run(typed: Typed) -> int:
    query = {"environment": "1"} if typed.flag("environment") else None
    return show_each(typed, "", _show, query)


def _show(job: "dict[str, Any]") -> None:
    for line in fact_lines(job):
        say(line)
    heading, *lines = attempt_lines(job, terminal_size()[0], ellipsis())
    if lines:
        say("")
        say(paint(heading, "dim"))
    for line in (*lines, *memory_lines(job, terminal_size()[0], is_unicode=is_unicode()), *advice_lines(job)):
        say(line)


def fact_lines(job: "dict[str, Any]") -> list[str]:
    return [f"{name}: {clean(value)}" for name, value in _facts(job)]


def attempt_lines(job: "dict[str, Any]", width: int | None, ellipsis: str) -> list[str]:
    """Return a heading, and a line for each attempt."""
    cells = [_attempt_cells(attempt, job["state"]) for attempt in job["attempts"]]
    return [join_cells(line) for line in lay_out(_ATTEMPTS, cells, width, ellipsis)]


def advice_lines(job: "dict[str, Any]") -> "Iterator[str]":
    for text in job["advice"]:
        yield ""
        yield f"note: {clean(text)}"


def _facts(job: "dict[str, Any]") -> "list[tuple[str, str]]":
    """Return names and values in the order in which people look for them, without options that were not given."""
    facts = [
        ("job", str(job["id"])),
        ("name", job["name"]),
        ("state", job["state"]),
        ("why", job["reason"] if job["ended_at"] is None else None),
        ("result", result_text(job) if job["ended_at"] is not None else None),
        ("command", job["command"]),
        ("directory", job["cwd"]),
        ("standard input", job["stdin"]),
        ("array", None if job["array"] is None else str(job["array"])),
        ("index", None if job["index"] is None else str(job["index"])),
        ("values", ", ".join(f"{name}={value}" for name, value in job["values"].items())),
        ("tag", job["tag"]),
        ("user", job["user"]),
        ("priority", str(job["priority"])),
        ("engine", _engine(job)),
        ("gpus", devices_text({**job, "place": None})),
        ("memory", job["memory"] and _memory(job["memory"], job["growth"])),
        ("limits", _bounds(job["need"])),
        ("after", ", ".join(map(_after_text, job["after"]))),
        ("submitted", format_time(job["submitted_at"])),
        ("started", job["started_at"] and format_time(job["started_at"])),
        ("ended", job["ended_at"] and format_time(job["ended_at"])),
        ("elapsed", None if job["elapsed_s"] is None else format_duration(job["elapsed_s"])),
        ("time limit", None if job["time_limit_s"] is None else format_duration(job["time_limit_s"])),
        ("expected duration", None if job["duration_s"] is None else format_duration(job["duration_s"])),
        ("retries", _retries(job) if job["retries"] else None),
        ("after a reboot", job["on_reboot"]),
        ("preempts", "jobs of lower priority" if job["preempts"] else None),
        ("if preempted", None if job["on_preempt"] == "suspend" else job["on_preempt"]),
        ("notify", "; ".join(map(_notify_text, job.get("notify", ())))),
        ("log", job["log"]),
    ]
    return [(name, value) for name, value in facts if value] + _environment(job)


def _memory(memory: "dict[str, Any]", growth: "dict[str, Any] | None") -> str:
    """Return the memory that the next attempt gets on each GPU, and where that figure comes from."""
    given, runs = memory["given_mb"], memory["runs"]
    size = "alone" if given is None else format_size(given) + (", alone" if memory["alone"] else "")
    if memory["basis"] == "grown" and growth is not None:
        return f"{size} (it ran out of memory {_TIMES.get(growth['count']) or format_count(growth['count'], 'time')})"
    if memory["basis"] == "unknown":
        amount = size if memory["alone"] else f"all free memory of a GPU, at least {size}"
        return f"{amount} (learned after the first run)"
    if memory["basis"] == "declared":
        return size
    arguments = "" if memory["same_command"] else " with other arguments"
    return f"{'' if given is None else 'learned '}{size} (from {format_count(runs, 'run')}{arguments})"


def _retries(job: "dict[str, Any]") -> str:
    """Return `1 of 3 used`. The failure of the first attempt uses no retry, so failures can exceed retries by one."""
    return f"{min(job['failures'], job['retries'])} of {job['retries']} used"


def _engine(job: "dict[str, Any]") -> str | None:
    """Return the engine, its id for the job, and the node it runs on; None for the local engine."""
    if job.get("engine", "local") == "local":
        return None
    attempts = job["attempts"]
    last = attempts[-1] if attempts else {"site_id": None, "place": None}
    where = f", on {last['place']}" if last["place"] else ""
    return f"{job['engine']}{' ' + last['site_id'] if last['site_id'] else ''}{where}"


def _bounds(need: "dict[str, Any]") -> str:
    """Return the limits on the machine and on its GPUs that were submitted with the job."""
    return ", ".join(text.format(need[key]) for key, text in _BOUNDS.items() if need.get(key) is not None)


def _after_text(dependency: "dict[str, Any]") -> str:
    kind = "" if dependency["kind"] == "ok" else f" ({dependency['kind']})"
    return f"{dependency['id']}{kind} {'met' if dependency['met'] else 'is ' + dependency['state']}"


def _notify_text(subscription: "dict[str, Any]") -> str:
    return f"{subscription['target'] or 'as configured'} on {', '.join(subscription['events'])}"


def _environment(job: "dict[str, Any]") -> "list[tuple[str, str]]":
    values = job["environment"]
    if values is None:
        return [("environment", " ".join(sorted(job["environment_names"])))]
    return [("environment", f"{name}={value}") for name, value in sorted(values.items())]


def _attempt_cells(attempt: "dict[str, Any]", state: str) -> list[str]:
    return [
        str(attempt["number"]),
        UNKNOWN if attempt["pid"] is None else str(attempt["pid"]),
        format_time(attempt["started_at"]),
        format_time(attempt["ended_at"]),
        ",".join(attempt["devices"]) or UNKNOWN,
        _attempt_result(attempt, state),
    ]


def _attempt_result(attempt: "dict[str, Any]", state: str) -> str:
    if attempt["ended_at"] is None:
        return state
    return result_text(attempt) if attempt["lack"] is None else "out of memory"  # memory_lines prints the details
