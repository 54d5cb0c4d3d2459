"""The hook of a workspace: a user's command that the runner runs before and after a task's program.

- The hook is a child of the runner, like the program. It outlives the daemon, and its output goes to the task's session
  and log.
- A hook that exceeds its time limit gets SIGTERM, and SIGKILL 10 s later.
"""

import re
import signal
from collections.abc import Callable, Mapping, Sequence

from gpuyard.engines.session.poll_loop import Loop
from gpuyard.engines.session.pty_program import PtyProgram

BEFORE, AFTER = "before", "after"
# The exit status of timeout(1).
TIMED_OUT = 124
_KILL_AFTER_S = 10.0
_GPU_PLACE = re.compile(r"gpu((?:x|[0-9]+)(?:_(?:x|[0-9]+))*)", re.ASCII)


class Hook:
    """One run of the hook. Starts it, and calls `on_output` with its output."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout_s: float,
        loop: Loop,
        on_output: Callable[[bytes], object],
    ) -> None:
        self._loop, self._on_output = loop, on_output
        self._timeout_s = timeout_s
        self._program = PtyProgram(command, environment)
        self._status: int | None = None
        self._is_late = False
        loop.watch(self._program.fileno(), lambda _: on_output(self._program.read()))
        self._program.start()
        loop.after(timeout_s, self._end_late)

    def has_ended(self) -> bool:
        if self._status is None:
            self._status = self._program.status()
            if self._status is not None:
                for output in self._program.remaining_output():
                    self._on_output(output)
        return self._status is not None

    @property
    def status(self) -> int:
        """The exit status of a hook that has ended, 0 if it succeeded."""
        return TIMED_OUT if self._is_late else self._status or 0

    @property
    def problem(self) -> str | None:
        """Why a hook that has ended failed, as the rest of a sentence about it; None if it succeeded."""
        if self._is_late:
            return f"did not end within {self._timeout_s:g} s"
        return f"failed with status {self._status}" if self._status else None

    def type(self, keys: bytes) -> None:
        self._program.type(keys)

    def signal(self, signum: int) -> None:
        self._program.signal(signum)

    def _end_late(self) -> None:
        if self._status is None:
            self._is_late = True
            self.signal(signal.SIGTERM)
            self._loop.after(_KILL_AFTER_S, lambda: self.signal(signal.SIGKILL))


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
