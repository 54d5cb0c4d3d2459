"""Restarts the daemon, on request or because an idle one is older than the command: jobs keep running, and the next
daemon takes them over.

- Each command names the pid that it stops, so none stops the new daemon of another.
- A daemon under a service manager ends with a status at which the manager starts the next one. If none accepts
connections within 15 s, one is started in the background. A web page that was open is opened again.
- A newer command demands a daemon that is at least as new with every request; an older one then does nothing and says
so. If it is idle, it is restarted; if not, the request is sent again without the demand, and the user reads what to do.
"""

import contextlib
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
_notices: set[tuple[Callable[[str], None] | None, str]] = set()


def status_of(path: str) -> Status | None:
    try:
        status: Status = _ask(path, "GET", "/status")
    except NoDaemon:
        return None
    return status


def replace_daemon(before: Status, reason: str) -> list[str]:
    """Stop the daemon with this status (its log gets the reason), start the next, and return notes for the user. Raises
    EnvironmentFault, and leaves it alone, if the next one could not read its database."""
    from gpuyard.store.database import refuse_schema

    refuse_schema(os.path.join(paths.state_folder(), "queue.db"))  # the next daemon would end, and none would run
    path, pid, is_managed = paths.socket_path(), before["pid"], before.get("managed", False)
    page: dict[str, Any] = {"url": None}
    # Another command may have stopped it, and started the next; or it ends before it answers, or hangs, which
    # `await_end` will show.
    with contextlib.suppress(UserError, EnvironmentFault):
        page = _ask(path, "GET", "/web")
        _ask(path, "POST", "/stop", {"pid": pid, "restart": True, "reason": reason})
    await_end(paths.lock_path(), pid)
    notes = []
    if start_daemon(wait_for_other_s=_MANAGER_S if is_managed else 0.0) and is_managed:
        within = f"within {_MANAGER_S:.0f} s"
        notes.append(f"its service manager did not start it again {within}: it runs in the background now")
    if page["url"]:
        try:
            _ask(path, "POST", "/web", {key: page[key] for key in ("address", "port", "read_only")})
        except GpuyardError as error:
            notes.append(f"the page is closed now: {error}; `gpuyard web` opens it")
    return notes


def _ask(path: str, method: str, route: str, body: object = None) -> Any:
    """Send one request, without notices about versions: the caller restarts the daemon anyway."""
    with DaemonConnection(path, may_start=False, on_notice=lambda _: None) as daemon:
        return daemon.request(method, route, body=body, timeout_s=30.0, is_repeatable=route == "/web")


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
        return f"{versions}: `gpuyard daemon restart` (running jobs go on)"
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
    for _ in range(5):  # a connection can reach the socket of a daemon that is ending; each try makes two connections
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
    if (show, line) not in _notices:
        _notices.add((show, line))
        if show is not None:
            show(line)
        else:
            sys.stderr.write(f"gpuyard: {line}\n")
            sys.stderr.flush()
