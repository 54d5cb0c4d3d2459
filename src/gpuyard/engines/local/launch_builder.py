"""Turns a Launch into what a keeper gets, and what the engine watches. A program gets the umask, the niceness and the
limits of the shell that submitted it. Most jobs come from a shell that has what the daemon has: then nothing is
changed, and starting them costs nothing more.
"""

import contextlib
import os
import sys
from pathlib import Path

from msgspec import convert

from gpuyard.engines.common import job_logs, output_relay
from gpuyard.engines.common import program_outcome as oom_evidence
from gpuyard.engines.common.bring_results import SnapshotResults
from gpuyard.engines.common.program_outcome import StartContext, check_arguments
from gpuyard.engines.common.spawn_program import LEASE_AT, ShellChange, SpawnSpec
from gpuyard.engines.containers.started_containers import StartedContainers
from gpuyard.engines.local import attempt_processes as process_tree
from gpuyard.engines.local import keeper_messages as kept_job
from gpuyard.engines.local.job_cgroups import JobCgroups
from gpuyard.engines.local.watched_attempt import WatchedAttempt
from gpuyard.engines.session.task_files import start_command
from gpuyard.model.shell_environment import UNLIMITED, ShellSettings, differences
from gpuyard.output.progress_line import VARIABLE as PROGRESS_VARIABLE
from gpuyard.ports import Launch
from gpuyard.system.submitting_shell import limit_number, read_shell_settings
from gpuyard.system.wakeable_poll import WakeablePoll

# A program gets its lease with this number, which has to be below its limit.
_FEWEST_OPEN_FILES = LEASE_AT + 1


class OwnShell:
    """The settings of this process, which its keeper inherits; `open_files` is the limit of jobs that have none."""

    def __init__(self, open_files: int) -> None:
        own = read_shell_settings()
        own["limits"]["NOFILE"] = UNLIMITED if open_files == sys.maxsize else open_files
        self._settings = convert(own, ShellSettings)
        self._open_files = open_files

    def changes(self, wanted: ShellSettings | None) -> tuple[int, ShellChange | None]:
        """Return the limit on open files, which the keeper sets for each program, and the other changes."""
        if wanted is None or wanted == self._settings:
            return self._open_files, None
        changed = differences(wanted, self._settings)
        limits = {number: soft for name, soft in changed.limits.items() if (number := limit_number(name)) is not None}
        nofile = limits.pop(limit_number("NOFILE") or 0, self._open_files)
        open_files = sys.maxsize if nofile == UNLIMITED else max(nofile, _FEWEST_OPEN_FILES)
        if changed.umask is None and changed.niceness is None and not limits:
            return open_files, None
        return open_files, (changed.umask, changed.niceness, limits)


class LaunchBuilder:
    def __init__(self, folder: Path, logs: Path, sessions_at: str, poll: WakeablePoll, *, open_files: int) -> None:
        """`folder` is that of the queue, `open_files` the limit on open files for jobs."""
        self.queue = str(folder)
        self.variables = {process_tree.QUEUE: self.queue}  # set for all jobs
        self.containers = StartedContainers(f"{folder}/containers", poll.wake)
        self.cgroups, self.results = JobCgroups(self.queue), SnapshotResults(poll.wake)
        self._logs = logs
        self._sessions_at = sessions_at
        self._own_shell = OwnShell(open_files)
        self._oom_kills = oom_evidence.OomKillCount()

    def build(self, launch: Launch, keeper_pid: int) -> tuple[kept_job.KeptLaunch, WatchedAttempt]:
        """Raises UserError if the command cannot be passed to a program."""
        outputs = job_logs.outputs_of(f"{self._logs}/{job_logs.name_of(launch.job_id, launch.attempt)}", launch)
        log, error_log = outputs[0][0], outputs[1][0] if len(outputs) > 1 else None
        progress = {PROGRESS_VARIABLE: job_logs.progress_file_of(self._logs, launch.key)}
        environment = {**launch.environment, **self.variables, **progress}
        self.results.note(launch)
        launch = self.containers.contain(launch, environment, self.queue)
        check_arguments(launch, environment)
        if launch.folder is not None:
            with contextlib.suppress(OSError):  # the program notices, and has the better error message
                os.mkdir(launch.folder)
        open_files, shell = self._own_shell.changes(launch.shell)
        spec = SpawnSpec(
            command=start_command(launch, self._sessions_at),
            environment=environment,
            directory=launch.cwd,
            outputs=outputs,
            stdin=launch.stdin or "",
            relay=output_relay.command(outputs) if launch.timestamps else (),
            open_files=open_files,
            shell=shell,
            cpus=launch.cpus,
            cgroup=self.cgroups.create(launch.key, launch.ram_limit_mb if launch.container is None else None),
        )
        watched = WatchedAttempt(
            job_id=launch.job_id, attempt=launch.attempt, keeper_pid=keeper_pid, context=StartContext.of(launch),
            log=log, error_log=error_log, kills=self._oom_kills.now(), has_runner=launch.task is not None,
        )  # fmt: skip
        return kept_job.KeptLaunch(launch.key, spec), watched
