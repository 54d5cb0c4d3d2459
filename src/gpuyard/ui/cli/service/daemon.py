"""`gpuyard daemon`: starts, stops and shows the daemon that runs the queue."""

from gpuyard.client.fast_http import DaemonConnection, NoDaemon, connect
from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.model.units import format_bytes, format_count, format_duration
from gpuyard.ui.cli.ask_daemon import request, say_answer
from gpuyard.ui.cli.command_grammar import JSON, Answer, Arguments, Typed, Verb
from gpuyard.ui.cli.jobs.job_text import FINISHED
from gpuyard.ui.cli.terminal import note, say_json
from gpuyard.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def run(typed: Typed) -> int:
    return _ACTIONS[typed.arguments[0]](typed)


def _run_in_foreground(_: Typed) -> int:
    from gpuyard.daemon.main import run_daemon

    return run_daemon(is_managed=True)


def _start(typed: Typed) -> int:
    from gpuyard.client.autostart import start_daemon

    while True:
        how = "started" if start_daemon() else "already running"
        try:
            with connect(start=False) as client:
                status = client.request("GET", "/status")
            return say_answer(typed, status, f"daemon {how} (pid {status['pid']})")
        except NoDaemon:  # it was ending, and still accepted connections
            continue


def _adopt(typed: Typed) -> int:
    from gpuyard.client.paths import state_folder
    from gpuyard.client.queue_host import adopt_queue

    host = typed.text("from")
    if host is None:
        hint = "write `gpuyard daemon adopt --from HOST`"
        raise UserError("adopt needs the machine that the queue belongs to", hint=hint)
    adopt_queue(state_folder(), host)
    answer = {"folder": state_folder(), "from": host}
    return say_answer(typed, answer, f"the queue in {state_folder()} belongs to this machine now")


def _stop(typed: Typed) -> int:
    from gpuyard.client.daemon_liveness import await_end
    from gpuyard.client.paths import lock_path

    client = _connect_if_running(typed)
    if client is None:
        return 1
    with client:
        status = client.request("GET", "/status")
        client.request("POST", "/stop", body={})
    await_end(lock_path(), status["pid"])
    answer = {"running": False, "pid": status["pid"], "jobs_running": status["under_way"]}
    return say_answer(typed, answer, f"daemon stopped{_still_running(status)}")


def _restart(typed: Typed) -> int:
    from gpuyard.client.paths import socket_path
    from gpuyard.client.restart_daemon import replace_daemon, status_of
    from gpuyard.model.version_order import is_newer

    before = status_of(socket_path())
    notes: list[str] = []
    if before is not None:
        if is_newer(before["version"], __version__):  # an older daemon may not be able to read its files
            from gpuyard.installation import find_installation

            here = find_installation()
            raise UserError(
                f"the daemon is version {before['version']}, newer than this command ({__version__})",
                hint=f"upgrade this gpuyard, in {here.folder}: {here.upgrade}; or restart it with the newer command",
            )
        notes = replace_daemon(before, f"`gpuyard daemon restart`, version {__version__}")
    status = request("GET", "/status")
    for each in notes:
        note(f"gpuyard: {each}")
    text = f"daemon started (pid {status['pid']}); none was running"
    if before is not None:
        text = f"daemon restarted (pid {status['pid']}, version {status['version']}){_still_running(status)}"
    replaced = None if before is None else {key: before[key] for key in ("pid", "version")}
    return say_answer(typed, {**status, "replaced": replaced}, text)


def _still_running(status: Answer) -> str:
    return f"; {format_count(status['under_way'], 'job')} still running" if status["under_way"] else ""


def _status(typed: Typed) -> int:
    client = _connect_if_running(typed)
    if client is None:
        return 1
    with client:
        status = client.request("GET", "/status")
    counts = [f"{count} {state}" for state, count in status["counts"].items() if count]
    pauses = (", paused" if status["paused"] else "") + (", draining" if status["draining"] else "")
    this = "" if status["version"] == __version__ else f" (this command is {__version__})"
    return say_answer(
        typed,
        {"running": True, **status},
        f"pid: {status['pid']}",
        f"version: {status['version']}{this}",
        f"up: {format_duration(status['uptime_s'])}",
        f"queue: {', '.join(counts) or 'empty'}{pauses}",
        f"socket: {status['socket']}",
        f"files: {status['state_dir']}",
        f"kept: {_kept(status)}",
        *(f"! {notice}" for notice in status["notices"]),
    )


def _kept(status: Answer) -> str:
    def limit(value: float | None, text: "Callable[[float], str]") -> str:
        return "no limit" if value is None else f"limit {text(value)}"

    kept = status["kept"]
    finished = format_count(sum(status["counts"][state] for state in FINISHED), "finished job")
    limits = [limit(kept["keep_log_bytes"], format_bytes)]
    if kept["keep_logs_s"] is not None:
        limits.append(limit(kept["keep_logs_s"], format_duration))
    logs = (
        "logs" if kept["logs"] is None else f"{format_count(kept['logs'], 'log')} of {format_bytes(kept['log_bytes'])}"
    )
    database = f"database {format_bytes(kept['database_bytes'])}"
    return f"{finished} ({limit(kept['keep_jobs_s'], format_duration)}), {logs} ({', '.join(limits)}), {database}"


def _connect_if_running(typed: Typed) -> DaemonConnection | None:
    """Connect, without a warning about another version; or say that no daemon runs, and return None."""
    try:
        return connect(start=False, on_notice=lambda _: None)
    except NoDaemon:
        if typed.flag("json"):
            say_json({"running": False})
        else:
            note("gpuyard: the daemon is not running\n  `gpuyard daemon start` starts it")
        return None


_ACTIONS = {
    "start": _start, "stop": _stop, "restart": _restart, "status": _status, "run": _run_in_foreground, "adopt": _adopt,
}  # fmt: skip
VERB = Verb(
    """Start, stop, restart or inspect the daemon that runs the queue.

    \b
    start   in the background; `gpuyard submit` does this automatically
    stop    running jobs continue, and the next daemon takes them over
    restart stop and start again; needed after an upgrade while jobs run
    status  its pid, queue and files; exit status 1 if it is not running
    run     in the foreground, for a service manager
    adopt   take over the queue in a shared folder from a machine that is gone
    """,
    (
        JSON,
        Option("from", "text", "HOST",
               "For `adopt`: the machine that is gone. Jobs that still run there would run twice."),
    ),
    Arguments("|".join(_ACTIONS), choices=tuple(_ACTIONS)),
)  # fmt: skip
