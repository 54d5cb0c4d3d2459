"""A sweep: the configs of a workspace as jobs of the queue.

The queue is the only record of what was started: `start` asks it what is there, and adds what is not. A config whose
marker exists is done. Of two who start the same workspace at once, one waits for the other.
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
    could_not_mark,
    make_folders,
    marker_of,
    record_for,
    record_of,
    unmarked,
)
from gpuyard.recipes.workspace.scheduler_log import has_own_logs, note, scheduler_log
from gpuyard.recipes.workspace.select_configs import choose, devices_for
from gpuyard.recipes.workspace.settings import Loaded, TaskOptions, load_task_options
from gpuyard.recipes.workspace.stop_sweep import tasks_of
from gpuyard.recipes.workspace.task_command import environment_of, hook_words, path_for, words_before_config
from gpuyard.recipes.workspace.task_names import config_name, scheduler_session, session_name, slug, tag_of
from gpuyard.system.atomic_files import locked, write_whole

NO_TMUX = "tmux is not installed, so tasks have no sessions; `gpuyard logs -f JOB` shows what one writes"
_JOBS_OWN = frozenset({"GPUYARD_JOB_ID", "GPUYARD_ATTEMPT", "GPUYARD_QUEUE", "GPUYARD_OOM_COUNT", "GPUYARD_LEASE"})


class SubmittedConfig(Struct, frozen=True, kw_only=True):
    config: str
    job: int
    gpu: str | None = None


class Skipped(Struct, frozen=True, kw_only=True):
    config: str
    why: str


class Started(Struct, frozen=True, kw_only=True):
    """`session` shows how it goes on."""

    tag: str
    submitted: tuple[SubmittedConfig, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    refused: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    session: str | None = None


class _Planned(Struct, frozen=True, kw_only=True):
    """`devices` are those it may use; `gpu` is the one that was named for it."""

    path: Path
    config: str
    options: TaskOptions
    devices: str | None
    gpu: str | None


def start(
    loaded: Loaded, configs: str | None, gpus: str | None, *, is_rerun: bool, engine: str | None = None
) -> Started:
    """Submits what is neither done nor under way. UserError, and nothing submitted, where the workspace is wrong."""
    if engine is not None:
        loaded = replace(loaded, settings=replace(loaded.settings, engine=engine))
    sweep = _Sweep(loaded)
    planned, notes = sweep.plan(configs, gpus)
    with locked(loaded.workspace), connect(start=True) as queue:
        return sweep.submit(queue, planned, notes, is_rerun=is_rerun)


class _Sweep:
    def __init__(self, loaded: Loaded) -> None:
        self._workspace, self._settings = loaded.workspace, loaded.settings
        self._config_file = loaded.path
        self._tag = tag_of(loaded.workspace)
        self._tmux = Tmux(os.environ) if loaded.settings.sessions == "tmux" else None
        self._has_tmux = self._tmux is not None and self._tmux.is_there()

    def plan(self, configs: str | None, gpus: str | None) -> tuple[list[_Planned], list[str]]:
        """All that can be wrong is found here."""
        settings = self._settings
        is_elsewhere = settings.engine not in (None, LOCAL)
        if settings.engine is not None:
            check_name(settings.engine)
        if is_elsewhere and gpus:
            raise UserError(f"GPUs are named, and {settings.engine} places tasks itself", hint="leave out one of them")
        paths = choose(settings, self._workspace, configs)
        devices, notes = ([None] * len(paths), []) if is_elsewhere else devices_for(settings, len(paths), gpus)
        self._environment = environment_of(settings)
        self._words = words_before_config(settings, self._workspace, self._environment)
        self._hook = hook_words(settings, self._workspace, self._environment)
        if self._tmux is not None and not self._has_tmux:
            notes.append(NO_TMUX)
        planned = []
        for path, device in zip(paths, devices, strict=True):
            options = load_task_options(path)
            if gpus and options.gpus is not None and options.gpus != 1:
                raise UserError(f"{path.name} asks for {options.gpus} GPUs, and one is named for it")
            gpu = device if gpus else None
            planned.append(_Planned(path=path, config=config_name(path), options=options, devices=device, gpu=gpu))
        make_folders(self._workspace, settings)
        self._scheduler_log = scheduler_log(settings, self._workspace)
        return planned, notes

    def submit(
        self, queue: DaemonConnection, planned: Sequence[_Planned], notes: list[str], *, is_rerun: bool
    ) -> Started:
        known = {task["config"]: task for task in tasks_of(queue, self._tag)}
        queue.request("POST", "/tags/go", body={"tag": self._tag}, is_repeatable=True)
        submitted: list[SubmittedConfig] = []
        skipped: list[Skipped] = []
        refused: list[Skipped] = []
        for each in planned:
            why = self._why_not(each, known.get(each.config), is_rerun=is_rerun)
            if why is not None:
                skipped.append(Skipped(config=each.config, why=why))
                continue
            try:
                with unmarked(marker_of(self._settings, each.config)):
                    job = self._submit_one(queue, each)
            except UserError as error:
                hint = f" ({error.hint})" if error.hint else ""
                refused.append(Skipped(config=each.config, why=f"{error}{hint}"))
                continue
            submitted.append(SubmittedConfig(config=each.config, job=job, gpu=each.gpu))
            problem = note(self._scheduler_log, f"{each.config} queued as job {job}")
            if problem is not None and problem not in notes:
                notes.append(problem)
        if submitted and self._settings.notify is not None:
            self._submit_notice(queue, [each.job for each in submitted])
        return Started(
            tag=self._tag,
            submitted=tuple(submitted),
            skipped=tuple(skipped),
            refused=tuple(refused),
            notes=tuple(notes),
            session=self._open_view() if submitted or any(task["is_live"] for task in known.values()) else None,
        )

    def _why_not(self, each: _Planned, task: dict[str, Any] | None, *, is_rerun: bool) -> str | None:
        if task is not None and not task["is_finished"]:
            return f"{'it runs' if task['is_live'] else 'it waits'} already, as job {task['id']}"
        marker = marker_of(self._settings, each.config)
        if is_rerun:
            return None
        if task is not None and could_not_mark(record_for(record_of(self._workspace, each.config), task)):
            write_whole(
                marker, f"{each.config} exited with status 0 as job {task['id']}; written by gpuyard\n".encode()
            )
        return f"completed: {os.path.relpath(marker, self._workspace)} is there" if os.path.lexists(marker) else None

    def _submit_one(self, queue: DaemonConnection, each: _Planned) -> int:
        settings = self._settings
        config_path = path_for(str(each.path), settings)
        marker = str(marker_of(settings, each.config))
        told = {
            "GPUYARD_WORKSPACE": str(self._workspace),
            "GPUYARD_TASK_NAME": settings.task_name,
            "GPUYARD_CONFIG_NAME": each.config,
            "GPUYARD_CONFIG_PATH": str(each.path),
            "GPUYARD_MARKER": marker,
        }
        return self._post(
            queue,
            command=(*self._words, config_path),
            environment={**self._environment, **told, **each.options.env},
            options=self._options(each),
            task=msgspec.to_builtins(self._task(each, marker)),
            crew=msgspec.to_builtins(
                TagSharing(most_per_device=settings.max_jobs_per_gpu, stagger_s=settings.startup_delay)
            ),
            configuration=_digest(each.path),
        )

    def _options(self, each: _Planned) -> dict[str, Any]:
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

    def _task(self, each: _Planned, marker: str) -> Task:
        settings, config = self._settings, each.config
        logs = f"{settings.log_dir}/train_logs" if settings.enable_logging else None
        is_shared = not has_own_logs(settings, self._workspace)
        return Task(
            workspace=str(self._workspace),
            config=config,
            owner=f"{self._tag}/{hashlib.blake2b(os.fsencode(config), digest_size=4).hexdigest()}",
            marker=marker,
            record=str(record_of(self._workspace, config)),
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

    def _submit_notice(self, queue: DaemonConnection, jobs: list[int]) -> None:
        """What comes when all of these are over."""
        words = (
            sys.executable,
            "-P",
            "-m",
            "gpuyard.recipes.workspace.notify_command",
            str(self._workspace),
            self._config_file,
        )
        options = {
            "gpus": 0,
            "engine": LOCAL,
            "after-any": ",".join(map(str, jobs)),
            "name": f"{slug(self._settings.task_name)}-notice",
        }
        self._post(queue, command=words, environment=self._environment, options=options)

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
        """In a session of its own, once; it closes itself where sessions are to."""
        if self._tmux is None or not self._has_tmux:
            return None
        settings, owner = self._settings, f"{self._tag}/scheduler"
        set_here = [f"{name}={value}" for name, value in os.environ.items() if _is_for_view(name)]
        words = [sys.executable, "-P", "-m", "gpuyard", "workspace", "--workspace", str(self._workspace)]
        words += ["--config", self._config_file, "status", "--watch"]
        words = ["/usr/bin/env", *set_here, *words]
        if settings.cleanup_on_complete:
            words = ["/bin/sh", "-c", '"$@"; exec tmux kill-session -t "$TMUX_PANE"', "sh", *words]
        name = scheduler_session(settings.task_name, settings.scheduler_session_suffix)
        try:
            return self._tmux.live_session(owner) or self._tmux.open_session(name, owner, words)
        except TmuxError as error:
            note(self._scheduler_log, f"no session for the view: {error}")
            return None


def _is_for_view(name: str) -> bool:
    """What says where the queue and the package are; never what says that we are a job."""
    return name.startswith(("GPUYARD_", "XDG_", "PYTHONPATH")) and name not in _JOBS_OWN


def _digest(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
