"""Opens, finds and closes sessions in the user's tmux. The option `@gpuyard` of a session names its owner; one without
it is not ours, even if the name matches. A running pane is never killed to show something new. The tmux server may be
started here and outlives us, so it inherits no variables of a job. The user's settings apply, except that our sessions
stay without clients and after their program, and have a long history."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpuyard.errors import EnvironmentFault

_MARK = "@gpuyard"
_ANSWERS_WITHIN_S = 20.0
_JOB_VARIABLES = (
    "GPUYARD_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "TMUX=", "TMUX_PANE=",
)  # fmt: skip
# tmux fixes the length of a window's history when it creates the window, and creates a session with a window. So the
# first window is a placeholder that is replaced at once; it ends by itself if that fails.
_FIRST_WINDOW = ("sleep", "60")
_HINT = "see whether `tmux new-session` works in a shell"


class TmuxError(EnvironmentFault):
    """tmux is not installed, or a command of it failed."""


class _TmuxSession(NamedTuple):
    id: str
    owner: str
    name: str

    def is_of(self, owner: str) -> bool:
        return bool(self.owner) and self.owner == owner


class Tmux:
    def __init__(self, environment: Mapping[str, str], *, hidden: str | None = None) -> None:
        """`hidden` is one more variable that the server must not inherit."""
        self._program = shutil.which("tmux", path=environment.get("PATH"))
        self._environment = {
            name: value
            for name, value in environment.items()
            if not f"{name}=".startswith(_JOB_VARIABLES) and name != hidden
        }

    def is_there(self) -> bool:
        return self._program is not None

    def open_session(self, name: str, owner: str, command: Sequence[str]) -> str:
        """Run the command in a session of that name, or of that name with a number. Return the session's name. The
        command needs at least two arguments; tmux passes a single one to a shell. A session that this owner has already
        is used again, and its clients stay attached."""
        sessions = self._sessions()
        first = candidate = session_name(name)
        number = 1
        while (there := sessions.get(candidate)) is None or not there.is_of(owner):
            if there is None:
                try:
                    self._create(candidate, owner, command)
                    return candidate
                except TmuxError:
                    sessions = self._sessions()
                    if candidate not in sessions:
                        raise
                    # Another process was faster.
            number += 1
            candidate = f"{first}-{number}"
        self._use_again(there, command)
        return candidate

    def live_session(self, owner: str) -> str | None:
        for session in self._sessions().values():
            if session.is_of(owner) and "0" in self._do(["list-panes", "-s", "-t", session.id, "-F", "#{pane_dead}"]):
                return session.name
        return None

    def kill_session(self, name: str, owner: str) -> bool:
        """Close the session. Return False if this owner has none of that name."""
        there = self._sessions().get(name)
        if there is None or not there.is_of(owner):
            return False
        try:
            self._do(["kill-session", "-t", there.id])
        except TmuxError:
            if name in self._sessions():
                raise
            return False  # it has ended in the meantime
        return True

    def owned_sessions(self, prefix: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for each in self._sessions().values():
            if each.owner and each.owner.startswith(prefix):
                found.setdefault(each.owner, []).append(each.name)
        return found

    def _sessions(self) -> dict[str, _TmuxSession]:
        try:
            listed = self._do(["list-sessions", "-F", f"#{{session_id}} #{{{_MARK}}} #{{session_name}}"])
        except TmuxError as error:
            if re.search(r"no server running|error connecting|no sessions|server exited", error.message):
                return {}
            raise
        sessions = (_TmuxSession(*line.split(" ", 2)) for line in listed.splitlines())
        return {each.name: each for each in sessions}

    def _create(self, name: str, owner: str, command: Sequence[str]) -> None:
        """Use one call of tmux: with `destroy-unattached` in the user's settings, the session would end in between."""
        target = f"={name}:"
        self._do(
            ["new-session", "-d", "-s", name, "-c", _here(), *_FIRST_WINDOW],
            ["set-option", "-t", target, "destroy-unattached", "off"],
            ["set-option", "-t", target, _MARK, owner],
            ["set-option", "-t", target, "history-limit", "50000"],
            ["new-window", "-k", "-t", f"{target}^", "-c", _here(), *command],
            ["set-option", "-w", "-t", target, "remain-on-exit", "on"],
        )

    def _use_again(self, session: _TmuxSession, command: Sequence[str]) -> None:
        panes = self._do(["list-panes", "-s", "-t", session.id, "-F", "#{pane_id} #{pane_dead}"])
        dead = [line.split()[0] for line in panes.splitlines() if line.endswith(" 1")]
        if dead:
            self._do(["respawn-pane", "-t", dead[0], "-c", _here(), *command])
            return
        target = f"{session.id}:"
        window = ["new-window", "-t", target, "-c", _here(), *command]
        self._do(window, ["set-option", "-w", "-t", target, "remain-on-exit", "on"])

    def _do(self, *commands: Sequence[str]) -> str:
        if self._program is None:
            raise TmuxError("tmux is not installed", hint="install it to look at sessions")
        arguments = [argument for command in commands for argument in [";", *map(_escaped, command)]]
        try:
            # The server keeps its working directory, and must not keep a file system busy.
            done = subprocess.run(
                [self._program, "-u", *arguments[1:]], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
                errors="replace", env=self._environment, cwd="/", timeout=_ANSWERS_WITHIN_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise TmuxError(f"tmux did not answer within {_ANSWERS_WITHIN_S:.0f} s", hint=_HINT) from None
        except OSError as error:
            raise TmuxError(f"{self._program} cannot be run: {error.strerror}", hint=_HINT) from error
        if done.returncode:
            raise TmuxError(f"tmux: {done.stderr.strip() or f'status {done.returncode}'}", hint=_HINT)
        return done.stdout


def session_name(name: str) -> str:
    """Replace all characters but letters, digits, `_` and `-`: tmux gives colons, dots, `#` and others a meaning."""
    return "".join(letter if letter.isalnum() or letter in "_-" else "_" for letter in name) or "_"


def _escaped(argument: str) -> str:
    """Escape a semicolon at the end, which would end the command."""
    return f"{argument[:-1]}\\;" if argument.endswith(";") else argument


def _here() -> str:
    with contextlib.suppress(OSError):
        return os.getcwd().replace("#", "##")  # tmux would run a command in #(…)
    return "/"
