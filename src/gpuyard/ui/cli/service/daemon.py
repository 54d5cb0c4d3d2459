"""`gpuyard daemon`: starts, stops and shows the daemon that runs the queue."""

from gpuyard.connect.fast_http import DaemonConnection, NoDaemon, connect
from gpuyard.errors import UserError
from gpuyard.ui.cli.terminal import note, say, say_json
from gpuyard.ui.cli.text_table import count_text, duration_text
from gpuyard.ui.cli.verb_options import JSON, Arguments, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

VERB = Verb(
    """Start, stop, restart or look at the daemon that runs the queue.

    \b
    start   in the background; `gpuyard submit` does so by itself
    stop    running jobs go on, and the next daemon takes them over
    restart the same, and the next daemon starts at once; needed after an upgrade while jobs run
    status  its pid, its queue, its files; exit status 1 where it does not run
    run     in the foreground, for a service manager
    """,
    (JSON,),
    Arguments("start|stop|restart|status|run", choices=("start", "stop", "restart", "status", "run")),
)


def run(typed: Typed) -> int:
    actions = {"start": _start, "stop": _stop, "restart": _restart, "status": _status, "run": _run}
    return actions[typed.words[0]](typed)


def _start(typed: Typed) -> int:
    before = _reach(tell=None)
    with before or connect(start=True) as client:
        status = client.request("GET", "/status")
    if typed.flag("json"):
        say_json(status)
    else:
        say(f"the daemon {'already runs' if before else 'is started'} (pid {status['pid']})")
    return 0


def _stop(typed: Typed) -> int:
    from gpuyard.connect.daemon_lock import await_end
    from gpuyard.connect.paths import lock_path

    client = _reach()
    if client is None:
        return _tell_absence(typed)
    with client:
        status = client.request("GET", "/status")
        client.request("POST", "/stop", body={})
    await_end(lock_path(), status["pid"])
    running = status["under_way"]
    if typed.flag("json"):
        say_json({"running": False, "pid": status["pid"], "jobs_running": running})
    else:
        say("the daemon is stopped" + (f"; {count_text(running, 'job')} still running" if running else ""))
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
        say(f"no daemon was running; one is started (pid {status['pid']})")
    else:
        running = status["under_way"]
        going_on = f"; {count_text(running, 'job')} still running" if running else ""
        say(f"the daemon is restarted (pid {status['pid']}, version {status['version']}){going_on}")
    return 0


def _refuse_older(version: str) -> None:
    """An older daemon may not be able to read what a newer one has written."""
    from gpuyard.core.version_mismatch import is_newer
    from gpuyard.version import __version__

    if is_newer(version, __version__):
        from gpuyard.installation import find_installation

        here = find_installation()
        raise UserError(
            f"the daemon is version {version}, and this command would put version {__version__} in its place",
            hint=f"upgrade this gpuyard, in {here.folder}: {here.upgrade}; or restart it with the newer one",
        )


def _status(typed: Typed) -> int:
    client = _reach()
    if client is None:
        return _tell_absence(typed)
    with client:
        status = client.request("GET", "/status")
    if typed.flag("json"):
        say_json({"running": True, **status})
        return 0
    counts = [f"{count} {state}" for state, count in status["counts"].items() if count]
    say(f"pid: {status['pid']}")
    say(f"version: {_version_text(status['version'])}")
    say(f"up: {duration_text(status['uptime_s'])}")
    say(f"queue: {', '.join(counts) or 'empty'}{_brakes(paused=status['paused'], draining=status['draining'])}")
    say(f"socket: {status['socket']}")
    say(f"files: {status['state_dir']}")
    for notice in status["notices"]:
        say(f"! {notice}")
    return 0


def _version_text(daemons: str) -> str:
    from gpuyard.version import __version__

    return daemons if daemons == __version__ else f"{daemons} (this command is {__version__})"


def _brakes(*, paused: bool, draining: bool) -> str:
    return (", paused" if paused else "") + (", draining" if draining else "")


def _run(typed: Typed) -> int:  # noqa: ARG001 - one of the actions
    from gpuyard.daemon.main import run_daemon

    return run_daemon(is_managed=True)


def _reach(tell: "Callable[[str], None] | None" = lambda _: None) -> DaemonConnection | None:
    """Without a word about a daemon of another version: most of those who ask see to that themselves."""
    try:
        return connect(start=False, tell=tell)
    except NoDaemon:
        return None


def _tell_absence(typed: Typed) -> int:
    if typed.flag("json"):
        say_json({"running": False})
    else:
        note("gpuyard: the daemon does not run\n  `gpuyard daemon start` starts it")
    return 1
