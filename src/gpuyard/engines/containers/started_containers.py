"""Runs attempts in containers, and removes each container at the end, however it ends.

A record, a small file, is written before a container can exist and removed when the container is gone. So a daemon
that takes over removes what an earlier one left. The tool removes the container itself when the program ends
(`--rm`); `TOOL rm` runs only after other ends: the tool was killed, or could not start it. The tool may fail or hang,
as its daemon does: each removal has a thread, kills a tool that has not ended after 30 s, and is tried again until it
has succeeded.

Until its container is gone the end of an attempt is held back, and with it its lease: the container may go on under
its daemon, with the GPU. Not for longer than 10 s: that daemon may hang.
"""

import contextlib
import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.engines.common.program_outcome import TOOL_FAILED
from gpuyard.engines.containers.container_commands import (
    ContainedProgram,
    HostUser,
    container_command,
    container_name,
    device_options,
    has_podman_init,
    remove_command,
)
from gpuyard.errors import EnvironmentFault
from gpuyard.model.container import Container, Mount, variables_to_pass
from gpuyard.model.units import MB
from gpuyard.output.progress_line import VARIABLE as PROGRESS_VARIABLE
from gpuyard.ports import Launch
from gpuyard.system.private_files import make_folder
from gpuyard.system.run_command import NotInTime, run_command
from gpuyard.system.system_limits import remedy_of

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


# What the tool needs to find the container again.
_TOOL_VARIABLES = ("PATH", "HOME", "TMPDIR")
_TOOL_PREFIXES = ("XDG_", "DOCKER_", "CONTAINER", "PODMAN_", "STORAGE_")
_HOLD_S = 10.0


class StartedContainers:
    """For one thread of one process at a time. Keys are those of attempts, such as `17.1`."""

    def __init__(self, folder: str, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when `collect` should be called."""
        self._folder = folder
        self._wake = wake
        self._records: dict[str, RemoveCommand] = {}  # by the name of the record, such as `17.1-a0b1`
        self._removals: dict[str, ContainerRemoval] = {}

    def contain(self, launch: Launch, environment: Mapping[str, str], queue: str) -> Launch:
        """Return the launch of the tool that runs the program in its container; record the container.

        environment: all variables of the job. Raises UserError if its devices cannot be mapped.
        """
        container = launch.container
        if container is None:
            return launch
        # Random: an attempt whose start was not recorded is prepared again, while its first container is removed.
        record = f"{launch.key}-{os.urandom(2).hex()}"
        name = container_name(queue, record)
        command = container_command(
            ContainedProgram(
                container=_with_progress_file(container, environment),
                name=name,
                command=launch.command,
                cwd=launch.cwd,
                variables=tuple(variables_to_pass(environment)),
                user=HostUser(uid=os.getuid(), gid=os.getgid(), groups=tuple(os.getgroups())),
                labels=(("gpuyard.job", str(launch.job_id)), ("gpuyard.attempt", str(launch.attempt)),
                        ("gpuyard.queue", queue)),
                devices=device_options(container.tool, launch.devices),
                shm_mb=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MB // 2,
                has_stdin=launch.stdin is not None,
                has_init=has_podman_init(),
            )
        )  # fmt: skip
        removal = remove_command(container.tool, name)
        if removal:
            self._record(record, RemoveCommand(removal, _tool_environment(environment)))
        return replace(launch, command=command)

    def take_over(self, live: Collection[str]) -> None:
        """Read the records of an earlier daemon, and remove the containers of attempts that are not live."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                with contextlib.suppress(OSError, msgspec.DecodeError):
                    self._records[name] = msgspec.json.decode(Path(self._folder, name).read_bytes(), type=RemoveCommand)
        for name in [name for name in self._records if _key(name) not in live]:
            self._remove(name)

    def has(self, key: str) -> bool:
        """Return whether the attempt may have a container."""
        return any(_key(name) == key for name in self._records)

    def end(self, key: str, status: int | None, kill: Callable[[], int]) -> bool:
        """Note the end of an attempt, with its exit status if that is known; remove its container if it may be left.

        Return whether to wait for the removal; then call it again later. After 10 s it returns False, and calls `kill`,
        which kills the attempt's processes and returns how many.
        """
        names = [name for name in self._records if _key(name) == key]
        if status is not None and status < TOOL_FAILED:  # else the tool failed, or was killed
            for name in names:
                self._forget(name)
            return False
        for name in names:
            self._remove(name)
        if any(time.monotonic() < self._removals[name].since + _HOLD_S for name in names):
            return True
        if names:
            _log.warning(
                "the container %s of job %s was not removed within %g s: %d of its processes were killed, and its GPUs "
                "are free for other jobs", self._removals[names[0]].container, key.partition(".")[0], _HOLD_S, kill()
            )  # fmt: skip
        return False

    def collect(self) -> None:
        """Forget the containers that are gone, and begin removals that could not begin yet."""
        for removal in self._removals.values():
            removal.begin()
        for name in [name for name, removal in self._removals.items() if removal.has_succeeded]:
            self._forget(name)

    def next_check_s(self) -> float | None:
        """Return after how many seconds the next end is no longer held back; None if none is."""
        now = time.monotonic()
        held_s = (removal.since + _HOLD_S - now for removal in self._removals.values())
        return min((each for each in held_s if each > 0), default=None)

    def problems(self) -> list[str]:
        """Return a line for each container that could not be removed so far."""
        return [removal.problem for removal in self._removals.values() if removal.problem is not None]

    def _remove(self, name: str) -> None:
        if name not in self._removals:
            self._removals[name] = ContainerRemoval(self._records[name], self._wake)

    def _record(self, name: str, removal: RemoveCommand) -> None:
        path = f"{self._folder}/{name}"
        try:
            make_folder(self._folder, is_closed=True)
            Path(path).write_bytes(msgspec.json.encode(removal))
        except OSError as error:
            raise EnvironmentFault(f"{path} cannot be written: {error.strerror}", hint=remedy_of(error)) from error
        self._records[name] = removal

    def _forget(self, name: str) -> None:
        self._records.pop(name, None)
        self._removals.pop(name, None)
        with contextlib.suppress(OSError):
            os.unlink(f"{self._folder}/{name}")


def _key(name: str) -> str:
    return name.rpartition("-")[0]


def _with_progress_file(container: Container, environment: Mapping[str, str]) -> Container:
    """Mount the file in which the program may write its progress. It is made first: a mount needs its source."""
    path = environment.get(PROGRESS_VARIABLE)
    if path is None:
        return container
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError as error:  # such as a full disk: the program runs without it
        _log.warning("%s cannot be made, so the container's program cannot write its progress: %s", path, error)
        return container
    return replace(container, mounts=(*container.mounts, Mount(source=path, target=path)))


def _tool_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name in _TOOL_VARIABLES or name.startswith(_TOOL_PREFIXES)
    }
