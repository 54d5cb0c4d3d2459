"""A client for commands that wait for hours: if the daemon ends, they continue with the next one.

A daemon that a user stopped stays stopped until a user starts it. A daemon that was killed is started again, because
no user may be present. `daemon.lock` shows which of the two happened.
"""

import os
import time

from gpuyard.client import paths
from gpuyard.client.fast_http import Closeable, DaemonConnection, NoDaemon, connect
from gpuyard.errors import EnvironmentFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuyard.client.fast_http import OnNotice


class RetryingClient(Closeable):
    """Sends GET requests, and repeats them for up to 30 s while no daemon answers. It never restarts a daemon."""

    def __init__(self, *, may_start: bool = True, on_notice: "OnNotice | None" = None) -> None:
        # Not kept: this connection would start a daemon again that a user has stopped meanwhile.
        connect(start=may_start).close()
        self._client: DaemonConnection | None = None
        self._on_notice = on_notice

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def get(self, path: str, query: "dict[str, str] | None" = None, timeout_s: float = 0.0) -> "dict[str, Any]":
        """Return the answer, which the daemon may delay by `timeout_s`."""
        from gpuyard.client.daemon_liveness import SilentDaemon

        within_s = timeout_s + 30.0
        deadline = time.monotonic() + within_s
        while True:
            try:
                self._client = self._client or self._connect()
                answer: dict[str, Any] = self._client.request("GET", path, query, timeout_s=within_s)
            except EnvironmentFault as error:
                # A daemon that is stopped may go on, which only a wait of hours can hope for.
                if time.monotonic() >= deadline or (not timeout_s and isinstance(error, SilentDaemon)):
                    raise
                self._client = None
                time.sleep(0.2)
            else:
                return answer

    def _connect(self) -> DaemonConnection:
        try:
            return connect(start=False, on_notice=self._on_notice)
        except NoDaemon:
            if not has_crashed():
                raise
        connect(start=True).close()
        return connect(start=False, on_notice=self._on_notice)


def has_crashed() -> bool:
    """Whether the last daemon was killed: a normal exit empties the lock file before the lock is released."""
    from gpuyard.client.daemon_liveness import running_pid

    path = paths.lock_path()
    # In this order: the content counts only while no process holds the lock.
    if running_pid(path) is not None:
        return False
    try:
        return os.stat(path).st_size > 0
    except FileNotFoundError:
        return False
