"""`gpuyard show`: all about a job."""

from gpuyard.ui.cli.jobs.attempt_text import memory_lines
from gpuyard.ui.cli.select_jobs import tell_each
from gpuyard.ui.cli.terminal import ellipsis, is_unicode, paint, room, say
from gpuyard.ui.cli.text_table import (
    UNKNOWN,
    Column,
    clean,
    count_text,
    devices_text,
    duration_text,
    lay_out,
    line_of,
    result_text,
    size_text,
    time_text,
)
from gpuyard.ui.cli.verb_options import JSON, SEVERAL, Option, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

VERB = Verb(
    """Show all about a job: what it is, what it needs, and each attempt to run it with the memory it used.

    Of its environment only the names are shown, since values may be secrets. IDS are such as 17, 17-20, name=big,
    tag=night or all.
    """,
    (Option("environment", None, "Show the values of its environment, too."), JSON),
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
    "model": "GPUs called {}",
    "max_utilization_percent": "GPU use up to {:g}%",
    "max_memory_used_mb": "GPU memory used up to {:g} MB",
    "max_power_w": "power up to {:g} W",
    "max_cpu_percent": "CPU use up to {:g}%",
    "min_host_memory_mb": "RAM from {:g} MB",
}
_TIMES = {1: "once", 2: "twice"}


def run(typed: Typed) -> int:
    query = {"environment": "1"} if typed.flag("environment") else None
    return tell_each(typed, "", _tell, query)


def _tell(job: "dict[str, Any]") -> None:
    for line in fact_lines(job):
        say(line)
    heading, *lines = attempt_lines(job, room()[0], ellipsis())
    if lines:
        say("")
        say(paint(heading, "dim"))
    for line in (*lines, *memory_lines(job, room()[0], is_unicode=is_unicode()), *advice_lines(job)):
        say(line)


def fact_lines(job: "dict[str, Any]") -> list[str]:
    return [f"{name}: {clean(value)}" for name, value in _facts(job)]


def attempt_lines(job: "dict[str, Any]", width: int | None, ellipsis: str) -> list[str]:
    """A heading, and a line for each attempt."""
    cells = [_attempt_cells(attempt, job["state"]) for attempt in job["attempts"]]
    return [line_of(line) for line in lay_out(_ATTEMPTS, cells, width, ellipsis)]


def advice_lines(job: "dict[str, Any]") -> "Iterator[str]":
    for text in job["advice"]:
        yield ""
        yield f"note: {clean(text)}"


def _facts(job: "dict[str, Any]") -> "list[tuple[str, str]]":
    """What is known, in the order in which people ask; what was not asked for is not mentioned."""
    facts = [
        ("job", str(job["id"])),
        ("name", job["name"]),
        ("state", job["state"]),
        ("why", job["reason"] if job["ended_at"] is None else None),
        ("result", result_text(job) if job["ended_at"] is not None else None),
        ("command", job["command"]),
        ("directory", job["cwd"]),
        ("standard input", job["stdin"]),
        ("array", None if job["array"] is None else f"{job['array']}, index {job['index']}"),
        ("values", ", ".join(f"{name}={value}" for name, value in job["values"].items())),
        ("tag", job["tag"]),
        ("user", job["user"]),
        ("priority", str(job["priority"])),
        ("engine", _engine(job)),
        ("gpus", devices_text({**job, "place": None})),
        ("memory", job["memory"] and _memory(job["memory"], job["growth"])),
        ("bounds", _bounds(job["need"])),
        ("after", ", ".join(map(_after_text, job["after"]))),
        ("submitted", time_text(job["submitted_at"])),
        ("started", job["started_at"] and time_text(job["started_at"])),
        ("ended", job["ended_at"] and time_text(job["ended_at"])),
        ("elapsed", None if job["elapsed_s"] is None else duration_text(job["elapsed_s"])),
        ("time limit", None if job["time_limit_s"] is None else duration_text(job["time_limit_s"])),
        ("takes about", None if job["duration_s"] is None else duration_text(job["duration_s"])),
        ("retries", _retries(job) if job["retries"] else None),
        ("after a reboot", job["on_reboot"]),
        ("preempts", "jobs of lower priority" if job["preempts"] else None),
        ("if preempted", None if job["on_preempt"] == "suspend" else job["on_preempt"]),
        ("notify", "; ".join(map(_notify_text, job.get("notify", ())))),
        ("log", job["log"]),
    ]
    return [(name, value) for name, value in facts if value] + _environment(job)


def _memory(memory: "dict[str, Any]", growth: "dict[str, Any] | None") -> str:
    """What its next run is given on each GPU, and why that much."""
    given, runs = memory["given_mb"], memory["runs"]
    size = "alone" if given is None else size_text(given) + (", alone" if memory["alone"] else "")
    if memory["basis"] == "grown" and growth is not None:
        return f"{size} (it ran out of memory {_TIMES.get(growth['count']) or count_text(growth['count'], 'time')})"
    if memory["basis"] == "unknown":
        known = size if memory["alone"] else f"what is free on a GPU, {size} at least"
        return f"{known} (the first run teaches)"
    if memory["basis"] == "declared":
        return size
    whose = "" if memory["same_command"] else " with other arguments"
    return f"{'' if given is None else 'learned '}{size} (from {count_text(runs, 'run')}{whose})"


def _retries(job: "dict[str, Any]") -> str:
    """The first run's failure used none up, so there may be one failure more than retries."""
    return f"{min(job['failures'], job['retries'])} of {job['retries']} used"


def _engine(job: "dict[str, Any]") -> str | None:
    """What it is handed over to, as what, and where that runs it."""
    if job.get("engine", "local") == "local":
        return None
    attempts = job["attempts"]
    last = attempts[-1] if attempts else {"site_id": None, "place": None}
    where = f", on {last['place']}" if last["place"] else ""
    return f"{job['engine']}{' ' + last['site_id'] if last['site_id'] else ''}{where}"


def _bounds(need: "dict[str, Any]") -> str:
    """Those on the machine and on its GPUs that were asked for."""
    return ", ".join(text.format(need[key]) for key, text in _BOUNDS.items() if need.get(key) is not None)


def _after_text(dependency: "dict[str, Any]") -> str:
    kind = "" if dependency["kind"] == "ok" else f" ({dependency['kind']})"
    return f"{dependency['id']}{kind} {'met' if dependency['met'] else 'is ' + dependency['state']}"


def _notify_text(wish: "dict[str, Any]") -> str:
    return f"{wish['target'] or 'as configured'} on {', '.join(wish['events'])}"


def _environment(job: "dict[str, Any]") -> "list[tuple[str, str]]":
    values = job["environment"]
    if values is None:
        return [("environment", " ".join(sorted(job["environment_names"])))]
    return [("environment", f"{name}={value}") for name, value in sorted(values.items())]


def _attempt_cells(attempt: "dict[str, Any]", state: str) -> list[str]:
    return [
        str(attempt["number"]),
        UNKNOWN if attempt["pid"] is None else str(attempt["pid"]),
        time_text(attempt["started_at"]),
        time_text(attempt["ended_at"]),
        ",".join(attempt["devices"]) or UNKNOWN,
        _attempt_result(attempt, state),
    ]


def _attempt_result(attempt: "dict[str, Any]", state: str) -> str:
    if attempt["ended_at"] is None:
        return state
    return result_text(attempt) if attempt["lack"] is None else "out of memory"  # what it lacked is told below
