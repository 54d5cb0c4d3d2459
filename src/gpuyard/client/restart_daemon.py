"""Restarts the daemon: the running one ends, and the next takes over its jobs, which keep running. On request, or
because an idle one is older than the command.

- Several commands may restart it at once. Each names the pid that it stops, so none stops the new daemon of another.
- A daemon under a service manager (`gpuyard daemon run`) ends with a status at which the manager starts the next one.
  If none accepts connections within 15 s, one is started in the background.
- A web page that was open is opened again at the same address.
- A newer command demands a daemon that is at least as new with every request; an older daemon then does nothing and
  says so. If it is idle, it is restarted and the request goes to the new one. If not, the request is sent again
  without the demand, and the user reads what to do.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from gpuyard.client import paths
from gpuyard.client.autostart import start_daemon
from gpuyard.client.daemon_liveness import await_end
from gpuyard.client.fast_http import TOO_OLD, DaemonConnection, NoDaemon
from gpuyard.errors import EnvironmentFault, GpuyardError, UserError
from gpuyard.model.lifecycle import LIVE
from gpuyard.model.version_order import is_newer
from gpuyard.version import __version__

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


_RESTART = "`gpuyard daemon restart` (running jobs go on)"
# A connection can reach the socket of a daemon that is ending; each try makes two connections.
_RESTARTS_AT_ONCE = 5
_notices: set[tuple[Callable[[str], None] | None, str]] = set()


def handle_version(connection: DaemonConnection, status: int, version: str | None) -> bool:
    """Act on an answer from a daemon of this version. Return whether the request must be sent again."""
    connection.known_version = version
    was_refused = 400 <= status < 500  # so nothing was done
    if connection.may_start and is_newer(__version__, version):
        if _is_replaced(connection, version):
            return was_refused
        connection.at_least = None
    is_in_error = status >= 400 and status != TOO_OLD  # the error names both versions
    if version != __version__ and not is_in_error:
        _notify(connection, advice(version))
    return status == TOO_OLD


def advice(version: str | None) -> str:
    """One line for the user about a daemon of this version, which is not ours."""
    versions = f"the daemon is {_named(version)}, this command is version {__version__}"
    if version is None or not is_newer(version, __version__):
        return f"{versions}: {_RESTART}"
    from gpuyard.installation import find_installation

    here = find_installation()
    return f"{versions} (in {here.folder}): upgrade it with `{here.upgrade}`, or use the newer one"


def with_missing_keys_explained(answer: Any, version: str | None) -> Any:
    """Return the answer so that reading a key it lacks raises EnvironmentFault with both versions, not KeyError."""
    if isinstance(answer, list):
        return [with_missing_keys_explained(each, version) for each in answer]
    if isinstance(answer, dict):
        return _Answer({key: with_missing_keys_explained(value, version) for key, value in answer.items()}, version)
    return answer


class _Answer(dict[str, Any]):
    def __init__(self, content: dict[str, Any], version: str | None) -> None:
        super().__init__(content)
        self.version = version

    def __missing__(self, key: str) -> Any:
        raise EnvironmentFault(f"the daemon's answer has no '{key}'", hint=advice(self.version))


def _is_replaced(connection: DaemonConnection, version: str | None) -> bool:
    """Restart an older daemon, if it may be restarted. Return whether the next request reaches another one."""
    try:
        before = _status_between_restarts(connection.path)
    except GpuyardError:
        return False  # it cannot say whether it is idle
    if before is None or before["version"] == __version__:
        return True  # another command is restarting it, or has done so
    # Only an idle daemon, and none under a service manager: the manager may start the old version again, and then every
    # command would restart it.
    if before.get("managed") or any(before["counts"].get(state) for state in LIVE):
        return False
    from gpuyard.store.database import refuse_schema

    try:
        refuse_schema(os.path.join(os.path.dirname(connection.path), "queue.db"))
    except EnvironmentFault as error:
        _notify(connection, f"the daemon stays: {error}; {error.hint}")
        return False
    connection.close()
    notes = replace_daemon(before, f"a newer command, version {__version__} in {sys.prefix}")
    connection.known_version = __version__
    for note in (f"restarted the daemon: it was {_named(version)}, this command is version {__version__}", *notes):
        _notify(connection, note)
    return True


def _status_between_restarts(path: str) -> Status | None:
    """Return the daemon's status, or None if none runs. A daemon that ends instead of answering is being restarted."""
    for _ in range(_RESTARTS_AT_ONCE):
        try:
            return status_of(path)
        except EnvironmentFault as error:
            if not isinstance(error.__cause__, ConnectionError):
                raise
    return None


def _named(version: str | None) -> str:
    return "an older version" if version is None else f"version {version}"


def _notify(connection: DaemonConnection, line: str) -> None:
    """Show each line once per process, however many connections it opens."""
    show = connection.on_notice
    if (show, line) in _notices:
        return
    _notices.add((show, line))
    if show is not None:
        show(line)
    else:
        sys.stderr.write(f"gpuyard: {line}\n")
        sys.stderr.flush()
