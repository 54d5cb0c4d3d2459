"""Restarts the daemon: the running one ends, and the next takes over its jobs, which keep running.

Rules:
- Several commands may restart it at once. Each names the pid that it stops, so none stops the new daemon of another.
- A daemon under a service manager (`gpuyard daemon run`) ends with a status at which the manager starts the next one.
  If none accepts connections within 15 s, one is started in the background.
- A web page that was open is opened again at the same address.
"""

import os
from typing import Any

from gpuyard.connect import paths
from gpuyard.connect.autostart import start_daemon
from gpuyard.connect.daemon_lock import await_end
from gpuyard.connect.fast_http import DaemonConnection, NoDaemon
from gpuyard.errors import EnvironmentFault, GpuyardError, UserError

Status = dict[str, Any]

# systemd waits 0.1 s before it starts a unit again, launchd up to 10 s.
_MANAGER_S = 15.0
_ANSWER_S = 30.0


def status_of(path: str) -> Status | None:
    try:
        with _connection(path) as daemon:
            status: Status = daemon.request("GET", "/status", timeout_s=_ANSWER_S)
            return status
    except NoDaemon:
        return None


def replace_daemon(before: Status, reason: str) -> list[str]:
    """Stop the daemon with this status and start the next. Return notes for the user. Raises EnvironmentFault, and
    leaves it alone, if the next one could not read its database.

    `reason` is written to the log of the daemon that ends.
    """
    from gpuyard.store.database import refuse_schema

    refuse_schema(os.path.join(paths.state_folder(), "queue.db"))  # the next daemon would end, and none would run
    path, is_managed = paths.socket_path(), before.get("managed", False)
    page = _stop(path, before["pid"], reason)
    await_end(paths.lock_path(), before["pid"])
    is_own = start_daemon(wait_for_other_s=_MANAGER_S if is_managed else 0.0)
    notes = [] if page is None else _open_page(path, page)
    if is_managed and is_own:
        note = f"its service manager did not start it again within {_MANAGER_S:.0f} s: it runs in the background now"
        notes.insert(0, note)
    return notes


def _stop(path: str, pid: int, reason: str) -> dict[str, Any] | None:
    page = None
    try:
        with _connection(path) as daemon:
            state = daemon.request("GET", "/web", timeout_s=_ANSWER_S)
            page = state if state["url"] else None
            body = {"pid": pid, "restart": True, "reason": reason}
            daemon.request("POST", "/stop", body=body, timeout_s=_ANSWER_S)
    except (UserError, EnvironmentFault):
        # Another command has stopped it, and may have started the next; or it ended before it answered, or hangs, which
        # `await_end` will show.
        pass
    return page


def _open_page(path: str, page: dict[str, Any]) -> list[str]:
    body = {key: page[key] for key in ("address", "port", "read_only")}
    try:
        with _connection(path) as daemon:
            daemon.request("POST", "/web", body=body, timeout_s=_ANSWER_S, is_repeatable=True)
    except GpuyardError as error:
        return [f"the page is closed now: {error}; `gpuyard web` opens it"]
    return []


def _connection(path: str) -> DaemonConnection:
    """Return a connection without notices about versions: the caller restarts the daemon anyway."""
    return DaemonConnection(path, may_start=False, on_notice=lambda _: None)
