"""`gpuyard` alone on a terminal: the GPUs and the queue. It starts no daemon."""

from gpuyard.connect.fast_http import NoDaemon, connect
from gpuyard.core.units import UNKNOWN, format_gigabytes
from gpuyard.ui.cli import import_verb
from gpuyard.ui.cli.jobs.queue_text import say_page
from gpuyard.ui.cli.terminal import paint, say, table_lines, terminal_size
from gpuyard.ui.cli.text_table import make_columns
from gpuyard.ui.cli.verb_options import Answer, run_verb

_COLUMNS = make_columns("GPU", "NAME", "LOAD", "MEMORY", "JOBS", right=("GPU", "LOAD", "MEMORY"), long=("NAME", "JOBS"))
_HELP = "`gpuyard --help` lists all commands"
# The lines besides the GPUs and the jobs: headings, counts, empty lines, the last line and the prompt.
_OTHER_LINES = 9


def show_overview() -> int:
    try:
        daemon = connect(start=False)
    except NoDaemon:
        return _show_machine()
    with daemon:
        devices = daemon.request("GET", "/devices")["devices"]
        lines = terminal_size()[1] or 24
        limit = max(5, lines - len(devices) - _OTHER_LINES)
        answer = daemon.request("GET", "/jobs", {"limit": str(limit)})
    if devices:
        say(*table_lines(_COLUMNS, [_cells(device) for device in devices]))
    else:
        say("no GPU was found: `gpuyard doctor` says why")
    say("")
    say_page(answer)
    say(paint(_HELP, "dim"))
    return 0


def _show_machine() -> int:
    run_verb("devices", import_verb("devices"), [])
    say("", "No queue is running: `gpuyard submit -- python train.py` starts it.", paint(_HELP, "dim"))
    return 0


def _cells(device: Answer) -> list[str]:
    load, total = device["utilization_percent"], device["memory_total_mb"]
    memory = f"{format_gigabytes(device['memory_used_mb'])}/{format_gigabytes(total)} GB"
    closed = device["fault"] or ("drained" if device["drain"] else "banned" if device["banned"] else "")
    jobs = ", ".join(filter(None, (_lease_text(lease) for lease in device["leases"])))
    return [
        device["label"] or UNKNOWN,
        device["name"] or UNKNOWN,
        UNKNOWN if load is None else f"{load:.0f}%",
        memory,
        jobs or closed or "idle",
    ]


def _lease_text(lease: Answer) -> str:
    return f"job {lease['job']}" if lease["is_own"] and lease["job"] is not None else str(lease["who"])
