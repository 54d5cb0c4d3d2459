"""Start a sweep, which submits the configs of a workspace as jobs of the queue; stop it, or kill it. The queue is the
only record of started tasks: `start` lists them and submits the missing ones. A config that has a marker is completed.
A lock on the workspace serializes commands. `stop` and `kill_all` work also without valid settings."""

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

from gpuyard.client.fast_http import DaemonConnection, connect
from gpuyard.client.paths import state_folder
from gpuyard.client.submitted_code import code_of
from gpuyard.engines.open_cluster_engine import LOCAL, check_name
from gpuyard.engines.session.tmux import Tmux, TmuxError
from gpuyard.errors import UserError
from gpuyard.model.job_spec import TagSharing, Task
from gpuyard.recipes.workspace import prepare_sweep
from gpuyard.recipes.workspace import workspace_files as files
from gpuyard.recipes.workspace.prepare_sweep import arguments_of
from gpuyard.recipes.workspace.settings import LoadedSettings, TaskOptions, WorkspaceSettings, load_task_options
from gpuyard.recipes.workspace.yaml_settings import cannot_read
from gpuyard.system.file_locks import locked
from gpuyard.system.files_outside_home import LOG, WORKSPACE, record_outside
from gpuyard.system.submitting_shell import read_shell_settings, starting_processes
from gpuyard.system.write_files import write_whole


class SubmittedConfig(Struct, frozen=True, kw_only=True):
    config: str
    job: int
    gpu: str | None = None
    log: str | None = None


class StartedSweep(Struct, kw_only=True):
    """What `start` did: the configs that were skipped or refused have the reason. `session` shows the progress."""

    tag: str
    submitted: list[SubmittedConfig] = []
    skipped: list[tuple[str, str]] = []
    refused: list[tuple[str, str]] = []
    notes: list[str] = []
    session: str | None = None


class _PlannedTask(Struct, frozen=True, kw_only=True):
    """A config to submit: `devices` are those it may use; `gpu` is the one that the user named for it."""

    config: str
    path: Path
    arguments: tuple[str, ...]
    options: TaskOptions
    devices: str | None
    gpu: str | None


def start(
    loaded: LoadedSettings, configs: Sequence[str], gpus: str | None, *, is_rerun: bool, engine: str | None = None
) -> StartedSweep:
    """Submit all configs, or those of these lists, that are neither completed nor in the queue. Raises UserError,
    before anything is submitted, if the workspace has a mistake."""
    if engine is not None:
        loaded = replace(loaded, settings=replace(loaded.settings, engine=engine))
    sweep = _Sweep(loaded)
    planned, notes = sweep.plan(configs, gpus)
    files.make_folders(loaded.workspace, loaded.settings)
    with locked(loaded.workspace), connect(start=True) as queue:
        return sweep.submit(queue, planned, notes, is_rerun=is_rerun)


def check(loaded: LoadedSettings) -> tuple[list[str], list[str]]:
    """Return the configs that `start` would consider, and its notes. Raises what `start` raises for a mistake."""
    planned, notes = _Sweep(loaded).plan([], None)
    return [each.config for each in planned], notes


class _Sweep:
    def __init__(self, loaded: LoadedSettings) -> None:
        self._workspace, self._settings, self._config_file = loaded.workspace, loaded.settings, loaded.path
        self._tag = files.workspace_tag(loaded.workspace)
        tmux = Tmux(os.environ)
        self._tmux = tmux if loaded.settings.sessions == "tmux" and tmux.is_there() else None

    def plan(self, configs: Sequence[str], gpus: str | None) -> tuple[list[_PlannedTask], list[str]]:
        """Check everything, and return the tasks and notes for the user. Writes nothing."""
        settings = self._settings
        if settings.engine is not None:
            check_name(settings.engine)
        if gpus and settings.engine not in (None, LOCAL):
            hint = "leave out the GPUs or the engine"
            raise UserError(f"GPUs cannot be named: the engine {settings.engine} chooses them", hint=hint)
        paths = prepare_sweep.choose_configs(settings, self._workspace, configs)
        devices, notes = prepare_sweep.choose_devices(settings, len(paths), gpus)
        self._environment, more_notes = prepare_sweep.task_environment(settings)
        notes += more_notes
        self._command = prepare_sweep.task_command(settings, self._workspace, self._environment)
        self._hook = prepare_sweep.hook_command(settings, self._workspace, self._environment)
        if self._tmux is None and settings.sessions == "tmux":
            notes.append(
                "tmux is not installed, so tasks have no sessions; `gpuyard logs -f JOB` shows a task's output"
            )
        arguments = arguments_of(settings, paths, self._workspace, self._config_file, self._environment)
        planned = []
        for path, device, own in zip(paths, devices, arguments, strict=True):
            options = load_task_options(path)
            if options.gpus is None and settings.gpu_count == 0:
                options = replace(options, gpus=0)
            if gpus and options.gpus is not None and options.gpus != 1:
                hint = "leave out the GPUs, or set `gpus: 1`"
                raise UserError(f"{path.name} asks for {options.gpus} GPUs, but one GPU is named for it", hint=hint)
            gpu = {"devices": device, "gpu": device if gpus else None}
            planned.append(_PlannedTask(config=path.stem, path=path, arguments=own, options=options, **gpu))
        return planned, notes

    def submit(
        self, queue: DaemonConnection, planned: Sequence[_PlannedTask], notes: list[str], *, is_rerun: bool
    ) -> StartedSweep:
        known = {task["config"]: task for task in list_tasks(queue, self._tag)}
        queue.request("POST", "/tags/go", body={"tag": self._tag}, is_repeatable=True)
        self._scheduler_log = files.scheduler_log(self._settings, self._workspace)
        # For `gpuyard uninstall`: the workspace, and its logs outside it.
        record_outside(state_folder(), WORKSPACE, [self._workspace])
        if not files.has_own_logs(self._settings, self._workspace):
            logs = [log for each in planned for log in files.task_logs(self._settings, self._workspace, each.config)]
            record_outside(state_folder(), LOG, filter(None, [*logs, self._scheduler_log]))
        started = StartedSweep(tag=self._tag, notes=notes)
        for each in planned:
            why = self._reason_to_skip(each, known.get(each.config), is_rerun=is_rerun)
            if why is not None:
                started.skipped.append((each.config, why))
                continue
            try:
                with files.without_marker(files.marker_path(self._settings, each.config)):
                    job = self._submit_one(queue, each)
            except UserError as error:
                hint = f" ({error.hint})" if error.hint else ""
                started.refused.append((each.config, f"{error}{hint}"))
                continue
            log = files.likely_log(self._settings, self._workspace, each.config)
            started.submitted.append(SubmittedConfig(config=each.config, job=job, gpu=each.gpu, log=log))
            problem = files.write_scheduler_log(self._scheduler_log, f"{each.config} queued as job {job}")
            if problem is not None and problem not in notes:
                notes.append(problem)
        if started.submitted and self._settings.notify is not None:
            self._submit_notify_job(queue, [each.job for each in started.submitted])
        if started.submitted or any(task["is_live"] for task in known.values()):
            started.session = self._open_view()
        return started

    def _reason_to_skip(self, each: _PlannedTask, task: dict[str, Any] | None, *, is_rerun: bool) -> str | None:
        if task is not None and not task["is_finished"]:
            return f"already {'running' if task['is_live'] else 'waiting'} as job {task['id']}"
        marker = files.marker_path(self._settings, each.config)
        if is_rerun:
            return None
        if task is not None and files.lacks_marker(files.read_record(self._workspace, task)):
            text = f"{each.config} exited with status 0 as job {task['id']}; written by gpuyard\n"
            write_whole(marker, text.encode())
        return f"completed: {os.path.relpath(marker, self._workspace)} exists" if os.path.lexists(marker) else None

    def _submit_one(self, queue: DaemonConnection, each: _PlannedTask) -> int:
        settings = self._settings
        marker = str(files.marker_path(settings, each.config))
        sharing = TagSharing(most_per_device=settings.max_jobs_per_gpu, stagger_s=settings.startup_delay)
        try:
            with each.path.open("rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except OSError as error:
            raise cannot_read(each.path, error) from error
        task_variables = {
            "GPUYARD_WORKSPACE": str(self._workspace),
            "GPUYARD_TASK_NAME": settings.task_name,
            "GPUYARD_CONFIG_NAME": each.config,
            "GPUYARD_CONFIG_PATH": str(each.path),
            "GPUYARD_MARKER": marker,
        }
        return self._post(
            queue,
            command=[*self._command, *each.arguments],
            environment={**self._environment, **task_variables, **each.options.env},
            options=self._options(each),
            task=msgspec.to_builtins(self._task(each, marker)),
            tag_sharing=msgspec.to_builtins(sharing),
            configuration=digest,
            code=code_of(self._command, settings.work_dir),
        )

    def _options(self, each: _PlannedTask) -> dict[str, Any]:
        settings, own = self._settings, each.options
        vram_mb = settings.vram if own.vram is None else own.vram
        timeout_s = settings.timeout if own.timeout is None else own.timeout
        has_gpu = own.gpus != 0
        options = {
            "name": files.slug(each.config),
            "tag": self._tag,
            "gpus": own.gpus,
            "vram": f"{vram_mb}M" if vram_mb is not None and has_gpu else None,
            "device": each.devices if has_gpu else None,
            "vendor": settings.vendor if has_gpu else None,
            "priority": settings.priority if own.priority is None else own.priority,
            "retries": settings.max_retries if settings.auto_restart_failed else 0,
            "retry-on": settings.retry_on if settings.auto_restart_failed and settings.max_retries else None,
            "retry-delay": None if settings.retry_delay is None else f"{settings.retry_delay}s",
            "time-limit": None if timeout_s is None else f"{timeout_s}s",
            "signal": settings.signal,
            "on-reboot": "requeue",
            "engine": settings.engine,
            "image": settings.image,
            "mount": prepare_sweep.task_mounts(settings),
        }
        return {name: value for name, value in options.items() if value is not None}

    def _task(self, each: _PlannedTask, marker: str) -> Task:
        settings, config = self._settings, each.config
        log, other_log = files.task_logs(settings, self._workspace, config)
        return Task(
            workspace=str(self._workspace),
            config=config,
            owner=f"{self._tag}/{hashlib.blake2b(os.fsencode(config), digest_size=4).hexdigest()}",
            marker=marker,
            record=str(files.record_path(self._workspace, config)),
            session=files.session_name(settings.worker_prefix, config) if self._tmux is not None else None,
            closes_session=settings.cleanup_on_complete,
            log=log,
            other_log=other_log,
            scheduler_log=self._scheduler_log,
            variable=settings.cuda_visible_devices_var,
            check_s=settings.check_interval,
            delay_s=settings.command_delay,
            grace_s=settings.exit_grace,
            hook=self._hook,
            hook_timeout_s=settings.hook_timeout,
        )

    def _submit_notify_job(self, queue: DaemonConnection, jobs: list[int]) -> None:
        module = "gpuyard.recipes.workspace.sweep_status"
        command = [sys.executable, "-P", "-m", module, str(self._workspace), self._config_file]
        name = f"{files.slug(self._settings.task_name)}-notice"
        options = {"gpus": 0, "engine": LOCAL, "after-any": ",".join(map(str, jobs)), "name": name}
        self._post(queue, command=command, environment=self._environment, options=options)

    def _post(self, queue: DaemonConnection, **fields: Any) -> int:
        own = {"token": secrets.token_hex(16), "cwd": self._settings.work_dir, "shell": read_shell_settings()}
        body = {**own, **fields, "submitters": starting_processes()}
        return int(queue.request("POST", "/submissions", body=body, is_repeatable=True)["first"])

    def _open_view(self) -> str | None:
        """Show `status --watch` in one tmux session, which closes itself if `cleanup_on_complete` is set."""
        if self._tmux is None:
            return None
        settings, owner = self._settings, f"{self._tag}/scheduler"
        # Variables that locate the queue and the package, but not those that mark a job's process.
        of_job = {f"GPUYARD_{name}" for name in ("JOB_ID", "ATTEMPT", "QUEUE", "OOM_COUNT", "LEASE")}
        names = [name for name in os.environ if name.startswith(("GPUYARD_", "XDG_", "PYTHONPATH"))]
        variables = [f"{name}={os.environ[name]}" for name in names if name not in of_job]
        command = ["/usr/bin/env", *variables, sys.executable, "-P", "-m", "gpuyard", "workspace"]
        command += ["--workspace", str(self._workspace), "--config", self._config_file, "status", "--watch"]
        if settings.cleanup_on_complete:
            command = ["/bin/sh", "-c", '"$@"; exec tmux kill-session -t "$TMUX_PANE"', "sh", *command]
        name = files.tmux_name(f"{settings.task_name}{settings.scheduler_session_suffix}")
        try:
            return self._tmux.live_session(owner) or self._tmux.open_session(name, owner, command)
        except TmuxError as error:
            files.write_scheduler_log(self._scheduler_log, f"cannot open a session for the status: {error}")
            return None


def stop(workspace: Path, settings: WorkspaceSettings | None) -> tuple[int, int]:
    """Return how many tasks no longer wait, and how many run."""
    tag = files.workspace_tag(workspace)
    with locked(workspace), connect(start=True) as queue:
        queue.request("POST", "/tags/stop", body={"tag": tag}, is_repeatable=True)
        tasks = list_tasks(queue, tag)
        cancelled = _cancel(queue, [task for task in tasks if task["is_waiting"]])
        running = sum(task["is_live"] for task in tasks)
    _note(workspace, settings, f"stopped: {running} running, {cancelled} no longer waiting")
    return cancelled, running


def kill_all(workspace: Path, settings: WorkspaceSettings | None) -> tuple[int, list[str], int]:
    """Cancel all running and waiting tasks, wait up to 20 s for their end, and close the sessions. Return how many
    tasks ended, which did not, and how many sessions were closed."""
    tag, tmux = files.workspace_tag(workspace), Tmux(os.environ)
    with locked(workspace), connect(start=True) as queue:
        tasks = [task for task in list_tasks(queue, tag) if not task["is_finished"]]
        _cancel(queue, tasks)
        ids = {task["id"] for task in tasks}
        if ids:
            queue.request("GET", "/wait", {"ids": ",".join(map(str, sorted(ids))), "timeout": "20.0"})
        after = list_tasks(queue, tag)
        left = [task["config"] for task in after if task["id"] in ids and not task["is_finished"]]
        owned = tmux.owned_sessions(f"{tag}/") if tmux.is_there() else {}
        for owner, names in owned.items():
            for name in names:
                tmux.kill_session(name, owner)
    ended, closed = len(tasks) - len(left), sum(map(len, owned.values()))
    _note(workspace, settings, f"killed: {ended} ended, {closed} sessions closed")
    return ended, left, closed


def _note(workspace: Path, settings: WorkspaceSettings | None, text: str) -> None:
    if settings is not None:
        files.write_scheduler_log(files.scheduler_log(settings, workspace), text)


def list_tasks(queue: DaemonConnection, tag: str) -> list[dict[str, Any]]:
    tasks: list[dict[str, Any]] = queue.request("GET", "/tasks", {"tag": tag})["tasks"]
    return tasks


def _cancel(queue: DaemonConnection, tasks: Sequence[dict[str, Any]]) -> int:
    if not tasks:
        return 0
    ids = ",".join(str(task["id"]) for task in tasks)
    return int(queue.request("POST", "/jobs/cancel", body={"ids": ids}, is_repeatable=True)["count"])
