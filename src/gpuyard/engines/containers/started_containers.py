"""Runs attempts in containers, and removes each container at the end, however it ends.

A record, a small file, is written before a container can exist and removed when the container is gone. So a daemon that
takes over removes what an earlier one left, also after the keeper was killed. The tool removes the container itself
when the program ends (`--rm`); `TOOL rm` runs only after other ends: the tool was killed, or could not start it.
Removing never blocks: a container daemon may hang.
"""

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.job.container import variables_to_pass
from gpuyard.engines.containers.device_options import device_options
from gpuyard.engines.containers.installed_tools import has_podman_init
from gpuyard.engines.containers.tool_commands import (
    ContainedProgram,
    HostUser,
    container_name,
    remove_command,
    run_command,
)
from gpuyard.errors import EnvironmentFault
from gpuyard.ports import Launch
from gpuyard.system.passing_errors import remedy_of
from gpuyard.system.private_files import make_folder
from gpuyard.system.wakeable_poll import WakeablePoll

_log = logging.getLogger(__name__)
_MB = 1048576
# The tools' own failures (125 to 127) and ends by signals start here. Below, the tool has removed the container.
_LEAST_SUSPECT_STATUS = 125
# What the tool needs to find the container again.
_TOOL_VARIABLES = ("PATH", "HOME", "TMPDIR")
_TOOL_PREFIXES = ("XDG_", "DOCKER_", "CONTAINER", "PODMAN_", "STORAGE_")
_NOT_THERE = b"no such container"
_CHUNK = 1 << 14
_RETRY_S = 10.0


class _Removal(Struct, frozen=True):
    command: tuple[str, ...]
    environment: dict[str, str]


class _RunningRemoval:
    """The tool while it removes a container, and what it has said so far."""

    def __init__(self, removal: _Removal) -> None:
        self._process = subprocess.Popen(
            removal.command,
            env=removal.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        assert self._process.stderr is not None
        self.pipe = self._process.stderr.fileno()
        self._said = b""
        os.set_blocking(self.pipe, False)

    def read(self) -> bool:
        """Read what the tool has said. Return whether it has ended."""
        try:
            while said := os.read(self.pipe, _CHUNK):
                self._said += said
        except BlockingIOError:
            return False
        return True

    def finish(self) -> tuple[int, bytes]:
        """Return its exit status and what it said."""
        with self._process:
            return self._process.wait(), self._said.strip()


class StartedContainers:
    """For one thread of one process at a time. Keys are those of attempts, such as `17.1`."""

    def __init__(self, folder: str, poll: WakeablePoll) -> None:
        """`poll` is ready when `collect` should be called."""
        self._folder = folder
        self._poll = poll
        self._removals: dict[str, _Removal] = {}  # by the name of the record, such as `17.1-a0b1`
        self._running: dict[str, _RunningRemoval] = {}
        self._failed_at: dict[str, float] = {}

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
        command = run_command(
            ContainedProgram(
                container=container,
                name=name,
                command=launch.command,
                cwd=launch.cwd,
                variables=tuple(variables_to_pass(environment)),
                user=HostUser(uid=os.getuid(), gid=os.getgid(), groups=tuple(os.getgroups())),
                labels=(("gpuyard.job", str(launch.job_id)), ("gpuyard.attempt", str(launch.attempt)),
                        ("gpuyard.queue", queue)),
                devices=device_options(container.tool, launch.devices),
                shm_mb=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _MB // 2,
                has_stdin=launch.stdin is not None,
                has_init=has_podman_init(),
            )
        )  # fmt: skip
        removal = remove_command(container.tool, name)
        if removal:
            self._record(record, _Removal(removal, _tool_environment(environment)))
        return replace(launch, command=command)

    def take_over(self, live: Collection[str]) -> None:
        """Read the records of an earlier daemon, and remove the containers of attempts that are not live."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                with contextlib.suppress(OSError, msgspec.DecodeError):
                    self._removals[name] = msgspec.json.decode(Path(self._folder, name).read_bytes(), type=_Removal)
        for name in [name for name in self._removals if _key(name) not in live]:
            self._remove(name)

    def end(self, key: str, status: int | None) -> None:
        """Note the end of an attempt, with its exit status if that is known; remove its container if it may be left."""
        for name in [name for name in self._removals if _key(name) == key]:
            if status is not None and status < _LEAST_SUSPECT_STATUS:
                self._forget(name)
            else:
                self._remove(name)

    def collect(self) -> None:
        """Look after the removals that run. Retry a removal 10 s after it failed."""
        now = time.monotonic()
        for name in [name for name, at in self._failed_at.items() if now >= at + _RETRY_S]:
            del self._failed_at[name]
            self._remove(name)
        for name, removal in list(self._running.items()):
            if not removal.read():
                continue
            del self._running[name]
            self._poll.forget(removal.pipe)
            status, said = removal.finish()
            if status == 0 or _NOT_THERE in said.lower():
                self._forget(name)
            else:
                self._note_failure(name, said.decode(errors="replace"))

    def _remove(self, name: str) -> None:
        if name in self._running:
            return
        try:
            self._running[name] = running = _RunningRemoval(self._removals[name])
        except OSError as error:
            self._note_failure(name, str(error))
        else:
            self._poll.watch(running.pipe)

    def _note_failure(self, name: str, problem: str) -> None:
        self._failed_at[name] = time.monotonic()
        _log.warning("the container %s was not removed, which is tried again: %s", name, problem)

    def _record(self, name: str, removal: _Removal) -> None:
        path = f"{self._folder}/{name}"
        try:
            make_folder(self._folder, is_closed=True)
            Path(path).write_bytes(msgspec.json.encode(removal))
        except OSError as error:
            raise EnvironmentFault(f"{path} cannot be written: {error.strerror}", hint=remedy_of(error)) from error
        self._removals[name] = removal

    def _forget(self, name: str) -> None:
        self._removals.pop(name, None)
        self._failed_at.pop(name, None)
        with contextlib.suppress(OSError):
            os.unlink(f"{self._folder}/{name}")


def _key(name: str) -> str:
    return name.rpartition("-")[0]


def _tool_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name in _TOOL_VARIABLES or name.startswith(_TOOL_PREFIXES)
    }
