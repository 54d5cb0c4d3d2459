"""A client for commands that wait for hours: where the daemon has gone, they go on with the next one.

A daemon that was stopped stays stopped, and they wait for somebody to start it. One that was killed they start again:
nobody may be there to do it. `daemon.lock` tells the two apart.
"""

import os
import time

from gpuyard.connect import paths
from gpuyard.connect.fast_http import DaemonConnection, NoDaemon, connect
from gpuyard.errors import EnvironmentFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self

_PATIENCE_S = 30.0
_RETRY_S = 0.2
_ANSWER_AFTER_S = 30.0


class RetryingClient:
    """Asks only what can be asked again. A daemon that stays away for half a minute is a fault after all.

    It never restarts a daemon of another version; `tell` is called with a line about it, as a Connection's.
    """

    def __init__(self, *, may_start: bool = True, tell: "Callable[[str], None] | None" = None) -> None:
        # Not kept: this one would start a daemon again that somebody has stopped in the meantime.
        connect(start=may_start).close()
        self._client: DaemonConnection | None = None
        self._tell = tell

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def get(self, path: str, query: "dict[str, str] | None" = None, timeout_s: float = 0.0) -> "dict[str, Any]":
        """`timeout_s` is how long the daemon may think about it."""
        patience = time.monotonic() + timeout_s + _PATIENCE_S
        while True:
            try:
                self._client = self._client or _connect(self._tell)
                answer: dict[str, Any] = self._client.request("GET", path, query, timeout_s=timeout_s + _ANSWER_AFTER_S)
            except EnvironmentFault:
                if time.monotonic() >= patience:
                    raise
                self._client = None
                time.sleep(_RETRY_S)
            else:
                return answer


def has_crashed() -> bool:
    """Whether the last daemon was killed: one that ends by itself empties the file before it lets go of the lock."""
    from gpuyard.connect.daemon_lock import running_pid

    path = paths.lock_path()
    # In this order: what the file says counts only once nobody holds it.
    if running_pid(path) is not None:
        return False
    try:
        return os.stat(path).st_size > 0
    except FileNotFoundError:
        return False


def _connect(tell: "Callable[[str], None] | None") -> DaemonConnection:
    try:
        return connect(start=False, tell=tell)
    except NoDaemon:
        if not has_crashed():
            raise
    connect(start=True).close()
    return connect(start=False, tell=tell)
