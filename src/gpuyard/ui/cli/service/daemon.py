"""`gpuyard daemon`: starts, stops and shows the daemon that runs the queue."""

from gpuyard.connect.fast_http import DaemonConnection, NoDaemon, connect
from gpuyard.core.units import format_count, format_duration
from gpuyard.errors import UserError
from gpuyard.ui.cli.terminal import note, say, say_json
from gpuyard.ui.cli.verb_options import JSON, Arguments, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

VERB = Verb(
    """Start, stop, restart or inspect the daemon that runs the queue.

    \b
    start   in the background; `gpuyard submit` does this automatically
    stop    running jobs continue, and the next daemon takes them over
    restart stop and start again; needed after an upgrade while jobs run
    status  its pid, queue and files; exit status 1 if it is not running
    run     in the foreground, for a service manager
    """,
    (JSON,),
    Arguments("start|stop|restart|status|run", choices=("start", "stop", "restart", "status", "run")),
)


def run(typed: Typed) -> int:
    actions = {"start": _start, "stop": _stop, "restart": _restart, "status": _status, "run": _run}
    return actions[typed.arguments[0]](typed)


def _start(typed: Typed) -> int:
    before = _connect_if_running(tell=None)
    with before or connect(start=True) as client:
        status = client.request("GET", "/status")
    if typed.flag("json"):
        say_json(status)
    else:
        say(f"daemon {'already running' if before else 'started'} (pid {status['pid']})")
    return 0


def _stop(typed: Typed) -> int:
    from gpuyard.connect.daemon_lock import await_end
    from gpuyard.connect.paths import lock_path

    client = _connect_if_running()
    if client is None:
        return _say_not_running(typed)
    with client:
        status = client.request("GET", "/status")
        client.request("POST", "/stop", body={})
    await_end(lock_path(), status["pid"])
    running = status["under_way"]
    if typed.flag("json"):
        say_json({"running": False, "pid": status["pid"], "jobs_running": running})
    else:
        say(f"daemon stopped{_still_running(running)}")
    return 0


def _restart(typed: Typed) -> int:
    from gpuyard.connect.paths import socket_path
    from gpuyard.connect.restart_daemon import replace_daemon, status_of
    from gpuyard.version import __version__

    before = status_of(socket_path())
    notes: list[str] = []
    if before is not None:
        _refuse_older(before["version"])
        notes = replace_daemon(before, f"`gpuyard daemon restart`, version {__version__}")
    with connect(start=True) as client:
        status = client.request("GET", "/status")
    for each in notes:
        note(f"gpuyard: {each}")
    if typed.flag("json"):
        replaced = None if before is None else {"pid": before["pid"], "version": before["version"]}
        say_json({**status, "replaced": replaced})
    elif before is None:
        say(f"daemon started (pid {status['pid']}); none was running")
    else:
        running = _still_running(status["under_way"])
        say(f"daemon restarted (pid {status['pid']}, version {status['version']}){running}")
    return 0


def _still_running(jobs: int) -> str:
    return f"; {format_count(jobs, 'job')} still running" if jobs else ""


def _refuse_older(version: str) -> None:
    """Raise if the running daemon is newer than this command: an older daemon may not be able to read its files."""
    from gpuyard.core.version_mismatch import is_newer
    from gpuyard.version import __version__

    if is_newer(version, __version__):
        from gpuyard.installation import find_installation

        here = find_installation()
        raise UserError(
            f"the daemon is version {version}, newer than this command ({__version__})",
            hint=f"upgrade this gpuyard, in {here.folder}: {here.upgrade}; or restart it with the newer command",
        )


def _status(typed: Typed) -> int:
    client = _connect_if_running()
    if client is None:
        return _say_not_running(typed)
    with client:
        status = client.request("GET", "/status")
    if typed.flag("json"):
        say_json({"running": True, **status})
        return 0
    counts = [f"{count} {state}" for state, count in status["counts"].items() if count]
    say(f"pid: {status['pid']}")
    say(f"version: {_version_text(status['version'])}")
    say(f"up: {format_duration(status['uptime_s'])}")
    say(f"queue: {', '.join(counts) or 'empty'}{_pause_text(status)}")
    say(f"socket: {status['socket']}")
    say(f"files: {status['state_dir']}")
    for notice in status["notices"]:
        say(f"! {notice}")
    return 0


def _version_text(daemon_version: str) -> str:
    from gpuyard.version import __version__

    if daemon_version == __version__:
        return daemon_version
    return f"{daemon_version} (this command is {__version__})"


def _pause_text(status: "dict[str, Any]") -> str:
    return (", paused" if status["paused"] else "") + (", draining" if status["draining"] else "")


def _run(typed: Typed) -> int:  # noqa: ARG001 - one of the actions
    from gpuyard.daemon.main import run_daemon

    return run_daemon(is_managed=True)


def _connect_if_running(tell: "Callable[[str], None] | None" = lambda _: None) -> DaemonConnection | None:
    """Connect, or return None. By default without the warning about another version, which the callers handle."""
    try:
        return connect(start=False, tell=tell)
    except NoDaemon:
        return None


def _say_not_running(typed: Typed) -> int:
    if typed.flag("json"):
        say_json({"running": False})
    else:
        note("gpuyard: the daemon is not running\n  `gpuyard daemon start` starts it")
    return 1
