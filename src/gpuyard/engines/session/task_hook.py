"""The hook of a workspace: a user's command that the runner runs before and after a task's program.

- The hook is a child of the runner, like the program. It outlives the daemon, and its output goes to the task's session
  and log.
- A hook that exceeds its time limit gets SIGTERM, and SIGKILL 10 s later.
"""

import re
import signal
from collections.abc import Mapping, Sequence

from gpuyard.engines.session.poll_loop import Loop
from gpuyard.engines.session.pty_program import PtyProgram

BEFORE, AFTER = "before", "after"
# The exit status of timeout(1).
TIMED_OUT = 124
KILL_AFTER_S = 10.0
_GPU_PLACE = re.compile(r"gpu((?:x|[0-9]+)(?:_(?:x|[0-9]+))*)", re.ASCII)


class Hook(PtyProgram):
    """One run of the hook, which starts at once. After a timeout its status is 124."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float, loop: Loop) -> None:
        super().__init__(command, environment)
        self._timeout_s = timeout_s
        self._loop = loop
        self._is_late = False
        self.start()
        loop.after(timeout_s, self._end_late)

    def status(self) -> int | None:
        status = super().status()
        return TIMED_OUT if self._is_late and status is not None else status

    @property
    def problem(self) -> str | None:
        """Why a hook that has ended failed, as the rest of a sentence about it; None if it succeeded."""
        if self._is_late:
            return f"did not end within {self._timeout_s:g} s"
        return f"failed with status {self.status()}" if self.status() else None

    def _end_late(self) -> None:
        if self.status() is None:
            self._is_late = True
            self.signal(signal.SIGTERM)
            self._loop.after(KILL_AFTER_S, lambda: self.signal(signal.SIGKILL))


def hook_variables(
    phase: str, place: str, log: str | None, outcome: str | None = None, status: int | None = None
) -> dict[str, str]:
    """Return the environment variables that a hook gets in addition to those of the program."""
    found = _GPU_PLACE.fullmatch(place)
    variables = {
        "GPUYARD_PHASE": phase,
        "GPUYARD_GPUS": found[1].replace("_", ",") if found else "",
        "GPUYARD_LOG": log,
        "GPUYARD_OUTCOME": outcome,
        "GPUYARD_EXIT_STATUS": None if status is None else str(status),
    }
    return {name: value for name, value in variables.items() if value is not None}
