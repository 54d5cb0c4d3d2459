"""The user's tmux: sessions that are opened, found again and closed there, each marked with whose it is.

- A session is marked with the option `@gpuyard`. One without our mark is somebody else's, whatever its name: it is
  neither used nor closed, and ours gets the next name that is free.
- What lives in a session is never killed for the sake of something new: only a pane that is dead is used again.
- The server that this may start is the user's from then on: it inherits nothing that marks a job.
- The user's own settings hold, but for what a session of ours cannot do without: it stays when nobody looks at it and
  when what it shows has ended, and has a long history.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpuyard.errors import EnvironmentFault

_MARK = "@gpuyard"
_HISTORY_LINES = "50000"
_ANSWERS_WITHIN_S = 20.0
_MOST_NAMESAKES = 100
_OF_A_JOB = ("GPUYARD_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
             "ZE_AFFINITY_MASK", "TMUX=", "TMUX_PANE=")  # fmt: skip
# A history is as long as its session says when its window is made, and a session comes with a window: so there is one
# that is replaced at once. It ends by itself, should nobody come to do so.
_FIRST_WINDOW = ("sleep", "60")
_NO_SERVER = re.compile(r"no server running|error connecting|no sessions|server exited")


class TmuxError(EnvironmentFault):
    """There is no tmux, or it would not do what it was told."""


class _TmuxSession(NamedTuple):
    id: str
    owner: str
    name: str

    def is_of(self, owner: str) -> bool:
        return bool(self.owner) and self.owner == owner


class Tmux:
    def __init__(self, environment: Mapping[str, str], *, hidden: str | None = None) -> None:
        """`hidden` is one more variable that a server must not inherit."""
        self._program = shutil.which("tmux", path=environment.get("PATH"))
        self._environment = {
            name: value
            for name, value in environment.items()
            if not f"{name}=".startswith(_OF_A_JOB) and name != hidden
        }

    def is_there(self) -> bool:
        return self._program is not None

    def open_session(self, name: str, owner: str, command: Sequence[str]) -> str:
        """Runs the command, of at least two words, in a session of that name or one like it, and says which.

        A session that has this owner's mark is used again, and whoever is attached to it stays.
        """
        sessions = self._sessions()
        for candidate in _namesakes(speakable(name)):
            there = sessions.get(candidate)
            if there is None:
                try:
                    self._create(candidate, owner, command)
                except TmuxError:
                    sessions = self._sessions()
                    if candidate not in sessions:
                        raise
                    continue  # somebody else was faster
            elif there.is_of(owner):
                self._use_again(there, command)
            else:
                continue
            return candidate
        raise TmuxError(f"there are {_MOST_NAMESAKES} sessions named {name} already", hint="close some of them")

    def showing(self, owner: str) -> str | None:
        """The name of a session of that owner's in which something lives."""
        for session in self._sessions().values():
            if session.is_of(owner) and "0" in self._do(["list-panes", "-s", "-t", session.id, "-F", "#{pane_dead}"]):
                return session.name
        return None

    def kill_session(self, name: str, owner: str) -> bool:
        """False where that owner has no such session."""
        there = self._sessions().get(name)
        if there is None or not there.is_of(owner):
            return False
        try:
            self._do(["kill-session", "-t", there.id])
        except TmuxError:
            if name in self._sessions():
                raise
            return False  # it has ended by itself since
        return True

    def owned_sessions(self, prefix: str) -> dict[str, list[str]]:
        """The names of sessions by their owners' marks that begin so."""
        found: dict[str, list[str]] = {}
        for each in self._sessions().values():
            if each.owner and each.owner.startswith(prefix):
                found.setdefault(each.owner, []).append(each.name)
        return found

    def _sessions(self) -> dict[str, _TmuxSession]:
        try:
            listed = self._do(["list-sessions", "-F", f"#{{session_id}} #{{{_MARK}}} #{{session_name}}"])
        except TmuxError as error:
            if _NO_SERVER.search(error.message):
                return {}
            raise
        sessions = (_TmuxSession(*line.split(" ", 2)) for line in listed.splitlines())
        return {each.name: each for each in sessions}

    def _create(self, name: str, owner: str, command: Sequence[str]) -> None:
        """In one go: a session that the user's settings destroy while nobody looks at it would be gone before."""
        its = f"={name}:"
        self._do(
            ["new-session", "-d", "-s", name, "-c", _here(), *_FIRST_WINDOW],
            ["set-option", "-t", its, "destroy-unattached", "off"],
            ["set-option", "-t", its, _MARK, owner],
            ["set-option", "-t", its, "history-limit", _HISTORY_LINES],
            ["new-window", "-k", "-t", f"{its}^", "-c", _here(), *command],
            ["set-option", "-w", "-t", its, "remain-on-exit", "on"],
        )

    def _use_again(self, session: _TmuxSession, command: Sequence[str]) -> None:
        panes = self._do(["list-panes", "-s", "-t", session.id, "-F", "#{pane_id} #{pane_dead}"])
        dead = [line.split()[0] for line in panes.splitlines() if line.endswith(" 1")]
        if dead:
            self._do(["respawn-pane", "-t", dead[0], "-c", _here(), *command])
        else:
            its = f"{session.id}:"
            self._do(
                ["new-window", "-t", its, "-c", _here(), *command],
                ["set-option", "-w", "-t", its, "remain-on-exit", "on"],
            )

    def _do(self, *commands: Sequence[str]) -> str:
        if self._program is None:
            raise TmuxError("tmux is not installed", hint="install it to look at sessions")
        words = [word for command in commands for word in [";", *map(_escaped, command)]]
        try:
            done = subprocess.run(
                [self._program, "-u", *words[1:]],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                env=self._environment,
                cwd="/",  # a server stays where it was started, and no folder must be in use for that
                timeout=_ANSWERS_WITHIN_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise TmuxError(f"tmux did not answer within {_ANSWERS_WITHIN_S:.0f} s", hint=_HINT) from None
        except OSError as error:
            raise TmuxError(f"{self._program} cannot be run: {error.strerror}", hint=_HINT) from error
        if done.returncode:
            raise TmuxError(f"tmux: {done.stderr.strip() or f'status {done.returncode}'}", hint=_HINT)
        return done.stdout


_HINT = "see whether `tmux new-session` works in a shell"


def speakable(name: str) -> str:
    """As tmux can hold and find it: it has a meaning of its own for colons, dots, `#` and others."""
    return "".join(letter if letter.isalnum() or letter in "_-" else "_" for letter in name) or "_"


def _namesakes(name: str) -> Iterator[str]:
    yield name
    for number in range(2, _MOST_NAMESAKES + 1):
        yield f"{name}-{number}"


def _escaped(word: str) -> str:
    """A semicolon at its end would end the command."""
    return f"{word[:-1]}\\;" if word.endswith(";") else word


def _here() -> str:
    try:
        return os.getcwd().replace("#", "##")  # else tmux would run what it reads as #(…)
    except OSError:
        return "/"
