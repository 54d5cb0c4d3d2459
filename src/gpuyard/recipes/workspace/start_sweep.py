"""Start a sweep: submit the configs of a workspace as jobs of the queue.

The queue is the only record of started tasks: `start` lists them and submits the missing ones. A config that has a
marker is completed. A lock on the workspace serializes concurrent `start` commands.
"""

import hashlib
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.connect.fast_http import DaemonConnection, connect
from gpuyard.core.job.workspace_task import Task
from gpuyard.core.scheduling.tag_sharing import TagSharing
from gpuyard.engines.registry import LOCAL, check_name
from gpuyard.engines.session.tmux import Tmux, TmuxError
from gpuyard.errors import UserError
from gpuyard.recipes.workspace.marker_files import (
    lacks_marker,
    make_folders,
    marker_path,
    read_record,
    record_path,
    without_marker,
)
from gpuyard.recipes.workspace.scheduler_log import has_own_logs, scheduler_log, write_scheduler_log
from gpuyard.recipes.workspace.select_configs import choose_configs, choose_devices
from gpuyard.recipes.workspace.settings import LoadedSettings, TaskOptions, load_task_options
from gpuyard.recipes.workspace.stop_sweep import list_tasks
from gpuyard.recipes.workspace.task_command import hook_command, path_in_work_dir, task_command, task_environment
from gpuyard.recipes.workspace.task_names import config_name, scheduler_session, session_name, slug, workspace_tag
from gpuyard.recipes.workspace.yaml_reader import cannot_read
from gpuyard.system.atomic_files import write_whole
from gpuyard.system.file_locks import locked

NO_TMUX = "tmux is not installed, so tasks have no sessions; `gpuyard logs -f JOB` shows a task's output"
_JOB_VARIABLES = frozenset({"GPUYARD_JOB_ID", "GPUYARD_ATTEMPT", "GPUYARD_QUEUE", "GPUYARD_OOM_COUNT", "GPUYARD_LEASE"})


class SubmittedConfig(Struct, frozen=True, kw_only=True):
    config: str
    job: int
    gpu: str | None = None


class Skipped(Struct, frozen=True, kw_only=True):
    config: str
    why: str


class StartedSweep(Struct, frozen=True, kw_only=True):
    """What `start` did with each config; `session` is the tmux session that shows the progress."""

    tag: str
    submitted: tuple[SubmittedConfig, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    refused: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    session: str | None = None


class _PlannedTask(Struct, frozen=True, kw_only=True):
    """A config to submit: `devices` are those it may use; `gpu` is the one that the user named for it."""

    path: Path
    config: str
    options: TaskOptions
    devices: str | None
    gpu: str | None


def start(
    loaded: LoadedSettings, configs: str | None, gpus: str | None, *, is_rerun: bool, engine: str | None = None
) -> StartedSweep:
    """Submit all configs that are neither completed nor in the queue.

    Raises UserError, before anything is submitted, if the workspace has a mistake.
    """
    if engine is not None:
        loaded = replace(loaded, settings=replace(loaded.settings, engine=engine))
    sweep = _Sweep(loaded)
    planned, notes = sweep.plan(configs, gpus)
    with locked(loaded.workspace), connect(start=True) as queue:
        return sweep.submit(queue, planned, notes, is_rerun=is_rerun)


class _Sweep:
    def __init__(self, loaded: LoadedSettings) -> None:
        self._workspace, self._settings = loaded.workspace, loaded.settings
        self._config_file = loaded.path
        self._tag = workspace_tag(loaded.workspace)
        self._tmux = Tmux(os.environ) if loaded.settings.sessions == "tmux" else None
        self._has_tmux = self._tmux is not None and self._tmux.is_there()

    def plan(self, configs: str | None, gpus: str | None) -> tuple[list[_PlannedTask], list[str]]:
        """Check everything, create the folders, and return the tasks and notes for the user."""
        settings = self._settings
        is_elsewhere = settings.engine not in (None, LOCAL)
        if settings.engine is not None:
            check_name(settings.engine)
        if is_elsewhere and gpus:
            raise UserError(
                f"GPUs cannot be named: the engine {settings.engine} chooses them",
                hint="leave out the GPUs or the engine",
            )
        paths = choose_configs(settings, self._workspace, configs)
        devices, notes = ([None] * len(paths), []) if is_elsewhere else choose_devices(settings, len(paths), gpus)
        self._environment = task_environment(settings)
        self._command = task_command(settings, self._workspace, self._environment)
        self._hook = hook_command(settings, self._workspace, self._environment)
        if self._tmux is not None and not self._has_tmux:
            notes.append(NO_TMUX)
        planned = []
        for path, device in zip(paths, devices, strict=True):
            options = load_task_options(path)
            if gpus and options.gpus is not None and options.gpus != 1:
                raise UserError(
                    f"{path.name} asks for {options.gpus} GPUs, but one GPU is named for it",
                    hint="leave out the GPUs, or set `gpus: 1`",
                )
            gpu = device if gpus else None
            planned.append(_PlannedTask(path=path, config=config_name(path), options=options, devices=device, gpu=gpu))
        make_folders(self._workspace, settings)
        self._scheduler_log = scheduler_log(settings, self._workspace)
        return planned, notes

    def submit(
        self, queue: DaemonConnection, planned: Sequence[_PlannedTask], notes: list[str], *, is_rerun: bool
    ) -> StartedSweep:
        known = {task["config"]: task for task in list_tasks(queue, self._tag)}
        queue.request("POST", "/tags/go", body={"tag": self._tag}, is_repeatable=True)
        submitted: list[SubmittedConfig] = []
        skipped: list[Skipped] = []
        refused: list[Skipped] = []
        for each in planned:
            why = self._reason_to_skip(each, known.get(each.config), is_rerun=is_rerun)
            if why is not None:
                skipped.append(Skipped(config=each.config, why=why))
                continue
            try:
                with without_marker(marker_path(self._settings, each.config)):
                    job = self._submit_one(queue, each)
            except UserError as error:
                hint = f" ({error.hint})" if error.hint else ""
                refused.append(Skipped(config=each.config, why=f"{error}{hint}"))
                continue
            submitted.append(SubmittedConfig(config=each.config, job=job, gpu=each.gpu))
            problem = write_scheduler_log(self._scheduler_log, f"{each.config} queued as job {job}")
            if problem is not None and problem not in notes:
                notes.append(problem)
        if submitted and self._settings.notify is not None:
            self._submit_notify_job(queue, [each.job for each in submitted])
        return StartedSweep(
            tag=self._tag,
            submitted=tuple(submitted),
            skipped=tuple(skipped),
            refused=tuple(refused),
            notes=tuple(notes),
            session=self._open_view() if submitted or any(task["is_live"] for task in known.values()) else None,
        )

    def _reason_to_skip(self, each: _PlannedTask, task: dict[str, Any] | None, *, is_rerun: bool) -> str | None:
        if task is not None and not task["is_finished"]:
            return f"already {'running' if task['is_live'] else 'waiting'} as job {task['id']}"
        marker = marker_path(self._settings, each.config)
        if is_rerun:
            return None
        if task is not None and lacks_marker(read_record(record_path(self._workspace, each.config), task)):
            write_whole(
                marker, f"{each.config} exited with status 0 as job {task['id']}; written by gpuyard\n".encode()
            )
        return f"completed: {os.path.relpath(marker, self._workspace)} exists" if os.path.lexists(marker) else None

    def _submit_one(self, queue: DaemonConnection, each: _PlannedTask) -> int:
        settings = self._settings
        config_path = path_in_work_dir(str(each.path), settings)
        marker = str(marker_path(settings, each.config))
        task_variables = {
            "GPUYARD_WORKSPACE": str(self._workspace),
            "GPUYARD_TASK_NAME": settings.task_name,
            "GPUYARD_CONFIG_NAME": each.config,
            "GPUYARD_CONFIG_PATH": str(each.path),
            "GPUYARD_MARKER": marker,
        }
        return self._post(
            queue,
            command=(*self._command, config_path),
            environment={**self._environment, **task_variables, **each.options.env},
            options=self._options(each),
            task=msgspec.to_builtins(self._task(each, marker)),
            crew=msgspec.to_builtins(
                TagSharing(most_per_device=settings.max_jobs_per_gpu, stagger_s=settings.startup_delay)
            ),
            configuration=_digest(each.path),
        )

    def _options(self, each: _PlannedTask) -> dict[str, Any]:
        settings, own = self._settings, each.options
        vram_mb = settings.vram_mb if own.vram_mb is None else own.vram_mb
        timeout_s = settings.timeout_s if own.timeout_s is None else own.timeout_s
        has_gpu = own.gpus != 0
        options = {
            "name": slug(each.config),
            "tag": self._tag,
            "gpus": own.gpus,
            "vram": f"{vram_mb}M" if vram_mb is not None and has_gpu else None,
            "device": each.devices if has_gpu else None,
            "priority": settings.priority if own.priority is None else own.priority,
            "retries": settings.max_retries if settings.auto_restart_failed else 0,
            "time-limit": None if timeout_s is None else f"{timeout_s}s",
            "on-reboot": "requeue",
            "engine": settings.engine,
        }
        return {name: value for name, value in options.items() if value is not None}

    def _task(self, each: _PlannedTask, marker: str) -> Task:
        settings, config = self._settings, each.config
        logs = f"{settings.log_dir}/train_logs" if settings.enable_logging else None
        is_shared = not has_own_logs(settings, self._workspace)
        return Task(
            workspace=str(self._workspace),
            config=config,
            owner=f"{self._tag}/{hashlib.blake2b(os.fsencode(config), digest_size=4).hexdigest()}",
            marker=marker,
            record=str(record_path(self._workspace, config)),
            session=session_name(settings.worker_prefix, config) if self._has_tmux else None,
            closes_session=settings.cleanup_on_complete,
            log=f"{logs}/{config}.log" if logs else None,
            other_log=f"{logs}/{self._tag}_{config}.log" if logs and is_shared else None,
            scheduler_log=self._scheduler_log,
            variable=settings.cuda_visible_devices_var,
            check_s=settings.check_interval,
            delay_s=settings.command_delay,
            grace_s=settings.exit_grace,
            hook=self._hook,
            hook_timeout_s=settings.hook_timeout,
        )

    def _submit_notify_job(self, queue: DaemonConnection, jobs: list[int]) -> None:
        """Submit a job that runs the `notify` command when all of `jobs` have finished."""
        module = "gpuyard.recipes.workspace.notify_command"
        command = (sys.executable, "-P", "-m", module, str(self._workspace), self._config_file)
        options = {
            "gpus": 0,
            "engine": LOCAL,
            "after-any": ",".join(map(str, jobs)),
            "name": f"{slug(self._settings.task_name)}-notice",
        }
        self._post(queue, command=command, environment=self._environment, options=options)

    def _post(
        self,
        queue: DaemonConnection,
        *,
        command: Sequence[str],
        environment: dict[str, str],
        options: dict[str, Any],
        **others: Any,
    ) -> int:
        body = {
            "token": secrets.token_hex(16),
            "command": list(command),
            "cwd": self._settings.work_dir,
            "environment": environment,
            "options": options,
            **others,
        }
        return int(queue.request("POST", "/submissions", body=body, is_repeatable=True)["first"])

    def _open_view(self) -> str | None:
        """Show `status --watch` in one tmux session, which closes itself if `cleanup_on_complete` is set."""
        if self._tmux is None or not self._has_tmux:
            return None
        settings, owner = self._settings, f"{self._tag}/scheduler"
        variables = [f"{name}={value}" for name, value in os.environ.items() if _is_for_view(name)]
        command = ["/usr/bin/env", *variables, sys.executable, "-P", "-m", "gpuyard", "workspace"]
        command += ["--workspace", str(self._workspace), "--config", self._config_file, "status", "--watch"]
        if settings.cleanup_on_complete:
            command = ["/bin/sh", "-c", '"$@"; exec tmux kill-session -t "$TMUX_PANE"', "sh", *command]
        name = scheduler_session(settings.task_name, settings.scheduler_session_suffix)
        try:
            return self._tmux.live_session(owner) or self._tmux.open_session(name, owner, command)
        except TmuxError as error:
            write_scheduler_log(self._scheduler_log, f"cannot open a session for the status: {error}")
            return None


def _is_for_view(name: str) -> bool:
    """Whether a variable locates the queue or the package. Variables that mark a job's process are left out."""
    return name.startswith(("GPUYARD_", "XDG_", "PYTHONPATH")) and name not in _JOB_VARIABLES


def _digest(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise cannot_read(path, error) from error
