"""Removes a container with its tool, which may fail or hang: a container daemon does both.

Each removal has a thread. A tool that has not ended after 30 s is killed. A removal that failed is tried again after
10 s, and then after twice as long each time, up to 10 minutes. The first failure is logged, and after that one an hour.
"""

import contextlib
import logging
import shlex
import threading
import time
from collections.abc import Callable

from msgspec import Struct

from gpuyard.system.run_command import NotInTime, run_command

_log = logging.getLogger(__name__)
_LIMIT_S = 30.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 10.0, 600.0
_WARN_AGAIN_S = 3600.0
_NOT_THERE = b"no such container"


class RemoveCommand(Struct, frozen=True):
    """The command that removes a container, whose name is the last argument."""

    command: tuple[str, ...]
    environment: dict[str, str]


class ContainerRemoval:
    """The removal of one container, from the first attempt until it has succeeded. `problem` is why the container is
    still there, and what to do; None before the first failure."""

    def __init__(self, removal: RemoveCommand, wake: Callable[[], None]) -> None:
        """`wake` is called, by the thread, when the container is gone."""
        self.since = time.monotonic()
        self.container = removal.command[-1]
        self.problem: str | None = None
        self.has_succeeded = False
        self._removal, self._wake = removal, wake
        self._has_begun = False
        self.begin()

    def begin(self) -> None:
        """Call it again later: the system may have no thread for it now."""
        if not self._has_begun:
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._run, name="gpuyard-container", daemon=True).start()
                self._has_begun = True

    def _run(self) -> None:
        delay_s, warn_at = _FIRST_RETRY_S, 0.0
        while (problem := _try_to_remove(self._removal)) is not None:
            command = shlex.join(self._removal.command)
            self.problem = f"the container {self.container} cannot be removed ({problem}): try `{command}`"
            if time.monotonic() >= warn_at:
                warn_at = time.monotonic() + _WARN_AGAIN_S
                _log.warning("the container %s was not removed, which is tried again: %s", self.container, problem)
            time.sleep(delay_s)
            delay_s = min(_LONGEST_RETRY_S, delay_s * 2)
        self.has_succeeded = True
        self._wake()


def _try_to_remove(removal: RemoveCommand) -> str | None:
    """Return why the container is still there, or None if it is gone."""
    try:
        status, _, said = run_command(removal.command, removal.environment, _LIMIT_S)
    except OSError as error:
        return str(error)
    except NotInTime:
        return f"it did not end within {_LIMIT_S:g} s"
    if status == 0 or _NOT_THERE in said.lower():
        return None
    return said.decode(errors="replace").strip() or f"exit status {status}"
