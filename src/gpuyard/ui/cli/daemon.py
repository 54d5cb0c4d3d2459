"""`gpuyard daemon`: starts, stops and shows the daemon that runs the queue."""

from gpuyard.daemon.client import Connection, NoDaemon, connect
from gpuyard.ui.cli.options import JSON, Typed, Verb, Words
from gpuyard.ui.cli.plain import count_text, duration_text
from gpuyard.ui.cli.terminal import note, say, say_json

VERB = Verb(
    """Start, stop or look at the daemon that runs the queue.

    \b
    start   in the background; `gpuyard submit` does so by itself
    stop    running jobs go on, and the next daemon takes them over
    status  its pid, its queue, its files; exit status 1 where it does not run
    run     in the foreground, for a service manager
    """,
    (JSON,),
    Words("start|stop|status|run", choices=("start", "stop", "status", "run")),
)


def run(typed: Typed) -> int:
    actions = {"start": _start, "stop": _stop, "status": _status, "run": _run}
    return actions[typed.words[0]](typed)


def _start(typed: Typed) -> int:
    before = _reach()
    client = before or connect(start=True)
    status = client.request("GET", "/status")
    if typed.flag("json"):
        say_json(status)
    else:
        say(f"the daemon {'already runs' if before else 'is started'} (pid {status['pid']})")
    return 0


def _stop(typed: Typed) -> int:
    from gpuyard.daemon.lock import await_end
    from gpuyard.daemon.places import lock_path

    client = _reach()
    if client is None:
        return _tell_absence(typed)
    status = client.request("GET", "/status")
    client.request("POST", "/stop", body={})
    await_end(lock_path(), status["pid"])
    running = status["under_way"]
    if typed.flag("json"):
        say_json({"running": False, "pid": status["pid"], "jobs_running": running})
    else:
        say("the daemon is stopped" + (f"; {count_text(running, 'job')} still running" if running else ""))
    return 0


def _status(typed: Typed) -> int:
    client = _reach()
    if client is None:
        return _tell_absence(typed)
    status = client.request("GET", "/status")
    if typed.flag("json"):
        say_json({"running": True, **status})
        return 0
    counts = [f"{count} {state}" for state, count in status["counts"].items() if count]
    say(f"pid: {status['pid']}")
    say(f"version: {status['version']}")
    say(f"up: {duration_text(status['uptime_s'])}")
    say(f"queue: {', '.join(counts) or 'empty'}{_brakes(paused=status['paused'], draining=status['draining'])}")
    say(f"socket: {status['socket']}")
    say(f"files: {status['state_dir']}")
    for notice in status["notices"]:
        say(f"! {notice}")
    return 0


def _brakes(*, paused: bool, draining: bool) -> str:
    return (", paused" if paused else "") + (", draining" if draining else "")


def _run(typed: Typed) -> int:  # noqa: ARG001 - one of the actions
    from gpuyard.daemon.main import run_daemon

    return run_daemon() or 0


def _reach() -> Connection | None:
    try:
        return connect(start=False)
    except NoDaemon:
        return None


def _tell_absence(typed: Typed) -> int:
    if typed.flag("json"):
        say_json({"running": False})
    else:
        note("gpuyard: the daemon does not run\n  `gpuyard daemon start` starts it")
    return 1
