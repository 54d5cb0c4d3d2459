"""A client for commands that wait for hours: where the daemon has gone, they go on with the next one."""

import time

from gpuyard.daemon.client import Client, connect
from gpuyard.errors import EnvironmentFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PATIENCE_S = 30.0
_RETRY_S = 0.2
_ANSWER_AFTER_S = 30.0


class PatientClient:
    """Asks only what can be asked again. A daemon that stays away for half a minute is a fault after all."""

    def __init__(self) -> None:
        # Only now: somebody who stops the daemon later does not want it started by those who wait.
        connect(start=True).close()
        self._client: Client | None = None

    def get(self, path: str, query: "dict[str, str] | None" = None, timeout_s: float = 0.0) -> "dict[str, Any]":
        """`timeout_s` is how long the daemon may think about it."""
        patience = time.monotonic() + timeout_s + _PATIENCE_S
        while True:
            try:
                self._client = self._client or connect(start=False)
                answer: dict[str, Any] = self._client.request("GET", path, query, timeout_s=timeout_s + _ANSWER_AFTER_S)
            except EnvironmentFault:
                if time.monotonic() >= patience:
                    raise
                self._client = None
                time.sleep(_RETRY_S)
            else:
                return answer
