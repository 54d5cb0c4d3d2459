"""Where gpuyard keeps its things, and what its configuration file and the environment say.

`GPUYARD_HOME=DIR` puts everything under one folder, so that a trial or a test touches nothing else. The file is
`config.toml` there, or where the platform's conventions put it:

    [devices]
    banned = [3, "GPU-…"]            # indexes or ids that nothing is placed on
    banned_names = ["GT 1030"]       # parts of names
    visible = "index"                # what CUDA_VISIBLE_DEVICES lists for programs; also "uuid"

    [leases]
    directory = "/var/lib/gpuyard"   # one that several users share

    [queue]
    cpu_jobs = 4                     # how many jobs without a GPU at once [the number of CPUs]
    max_cpu_percent = 95             # nothing starts while the CPU is busier than this, smoothed [no bound]
    min_free_memory_mb = 512         # nothing starts while less RAM than this is available
    max_foreign_load_percent = 50    # nothing starts on a GPU that programs outside gpuyard keep busier; 100: no bound
    engine = "slurm"                 # what runs jobs that name no engine [local]
    [queue.tags]
    download = 2                     # how many jobs of a tag at once

    [packing]
    max_jobs_per_device = 4          # how many share a GPU at most [no bound]
    max_load_percent = 200           # and how busy they may keep it together; 0 for no bound
    first_run_part = 0.5             # a new program starts where this part of a GPU is free; 1 for a GPU alone
    settle_s = 60                    # and what it uses, once it has been seen for so long; 0 for never

    [suspend]
    ram_reserve_mb = 2048            # RAM that stays free when a job's memory is moved there

    [notify]
    on = ["failed", "queue-empty"]   # also finished, out-of-memory, gpu-free
    to = ["ntfy://topic", "notify-send \"$GPUYARD_TITLE\" \"$GPUYARD_BODY\""]  # services by their URLs, commands
    per_minute = 6                   # how many messages each of them gets at most; what is over is told together
    gpu_free_s = 30                  # a GPU that was in use is free when nobody has been on it for so long

    [web]                            # the daemon serves its page from its start; `web = true` at the top does so too
    enabled = true                   # false for what `gpuyard web` goes by alone
    address = "127.0.0.1"            # any other is reached from elsewhere, unencrypted
    port = 8765                      # 0 for any [8765, or the next that is free]
    read_only = false

    [slurm]
    folder = "/home/me/gpuyard"      # one that the nodes see too, for logs and what they tell [the queue's own]
    partition = "gpu"                # also account, qos, and options = ["--constraint=a100"] for every job
    gpu_memory = "80G"               # of each card
    shard_mb = 1024                  # how much memory a shard stands for, where the site has shards
    nice_base = 0                    # what a job of priority 0 gets; more of it leaves room for higher priorities
    most_jobs = 5000                 # how many are there at once
    poll_s = 10                      # how long it may take to hear of what Slurm alone knows

    [ray]
    folder = "/home/me/gpuyard"
    address = "http://127.0.0.1:8265"  # of the dashboard [RAY_API_SERVER_ADDRESS]
    gpu_memory = "80G"
    most_jobs = 1000
    poll_s = 10
"""

import difflib
import os
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from gpuyard.core.notify.subscriptions import check_target, parse_event
from gpuyard.core.units import parse_size
from gpuyard.errors import UserError


class DeviceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    banned: tuple[int | str, ...] = ()
    banned_names: tuple[str, ...] = ()
    visible: str = "index"

    def __post_init__(self) -> None:
        if self.visible not in ("index", "uuid"):
            raise ValueError(f'visible = \'{self.visible}\' is not known; write "index" or "uuid"')

    @property
    def shows_uuids(self) -> bool:
        return self.visible == "uuid"


class LeaseConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    directory: str | None = None


class QueueConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cpu_jobs: Annotated[int, Meta(ge=1)] | None = None
    max_cpu_percent: Annotated[float, Meta(gt=0)] | None = None
    min_free_memory_mb: Annotated[float, Meta(ge=0)] = 512.0
    max_foreign_load_percent: Annotated[float, Meta(ge=0, le=100)] = 50.0
    tags: dict[str, Annotated[int, Meta(ge=0)]] = {}
    engine: str = "local"


class PackingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_jobs_per_device: Annotated[int, Meta(ge=1)] | None = None
    max_load_percent: Annotated[float, Meta(ge=0)] = 200.0
    first_run_part: Annotated[float, Meta(gt=0, le=1)] = 0.5
    settle_s: Annotated[float, Meta(ge=0)] = 60.0


class SuspendConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ram_reserve_mb: Annotated[float, Meta(ge=0)] = 2048.0


class NotifyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    on: tuple[str, ...] = ("failed", "queue-empty")
    to: tuple[str, ...] = ()
    per_minute: Annotated[int, Meta(ge=1, le=1000)] = 6
    gpu_free_s: Annotated[float, Meta(ge=0)] = 30.0

    def __post_init__(self) -> None:
        try:
            for event in self.on:
                parse_event(event)
            for target in self.to:
                check_target(target)
        except UserError as error:
            raise ValueError(f"{error}; {error.hint}" if error.hint else str(error)) from None


class WebConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: bool = True
    address: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    read_only: bool = False


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all engines have that place work themselves."""

    folder: str | None = None
    gpu_memory: str | None = None
    poll_s: Annotated[float, Meta(gt=0)] = 10.0

    def __post_init__(self) -> None:
        if self.folder is not None and not os.path.isabs(os.path.expanduser(self.folder)):
            raise ValueError(f"folder = '{self.folder}' is not an absolute path")
        try:
            self.card_mb  # noqa: B018 - whether it can be read
        except UserError as error:
            raise ValueError(f"gpu_memory: {error}") from None

    @property
    def card_mb(self) -> float | None:
        return None if self.gpu_memory is None else parse_size(self.gpu_memory)


class SlurmConfig(ClusterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    options: tuple[str, ...] = ()
    shard_mb: Annotated[float, Meta(gt=0)] | None = None
    nice_base: Annotated[int, Meta(ge=0)] = 0
    most_jobs: Annotated[int, Meta(ge=1)] = 5000


class RayConfig(ClusterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: str | None = None
    most_jobs: Annotated[int, Meta(ge=1)] = 1000


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    devices: DeviceConfig = DeviceConfig()
    leases: LeaseConfig = LeaseConfig()
    queue: QueueConfig = QueueConfig()
    packing: PackingConfig = PackingConfig()
    suspend: SuspendConfig = SuspendConfig()
    notify: NotifyConfig = NotifyConfig()
    slurm: SlurmConfig = SlurmConfig()
    ray: RayConfig = RayConfig()
    web: bool | WebConfig = False

    @property
    def page(self) -> WebConfig:
        return self.web if isinstance(self.web, WebConfig) else WebConfig(enabled=self.web)


def load_config() -> Config:
    path = config_dir() / "config.toml"
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Config()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    return parse_config(raw, path)


def config_stamp() -> int | None:
    """Changes when the file does; `None` where there is none."""
    try:
        return (config_dir() / "config.toml").stat().st_mtime_ns
    except OSError:
        return None


def parse_config(raw: dict[str, Any], path: Path) -> Config:
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}", hint=_nearest(str(error))) from error


def lease_dir() -> Path:
    """GPUYARD_LOCK_DIR, else the configuration's, else one of this user's own."""
    named = os.environ.get("GPUYARD_LOCK_DIR") or load_config().leases.directory
    if named:
        path = Path(named).expanduser()
        if not path.is_absolute():
            raise UserError(
                f"the lease directory '{named}' is not an absolute path",
                hint="each working directory would have a ledger of its own",
            )
        return path
    home = _home()
    return home / "locks" if home else Path.home() / ".gpu_locks"


def config_dir() -> Path:
    return _home() or _user_dir("XDG_CONFIG_HOME", "~/.config")


def state_dir() -> Path:
    """What must outlive a reboot."""
    return _home() or _user_dir("XDG_STATE_HOME", "~/.local/state")


def _user_dir(variable: str, default: str) -> Path:
    """Return gpuyard's directory by the XDG rules, or the usual one of macOS. Ignores a relative `variable`."""
    named = os.environ.get(variable, "").strip()
    if not os.path.isabs(named):
        named = os.path.expanduser("~/Library/Application Support" if sys.platform == "darwin" else default)
    return Path(named, "gpuyard")


def simulated_devices() -> str | None:
    """The value of GPUYARD_SIMULATE, such as `2x24GB`, where simulated devices stand in for real ones."""
    return os.environ.get("GPUYARD_SIMULATE") or None


def _home() -> Path | None:
    home = os.environ.get("GPUYARD_HOME")
    return Path(home).expanduser().absolute() if home else None


def _nearest(complaint: str) -> str | None:
    """For a key that is not known, the one that was probably meant."""
    _, found, rest = complaint.partition("unknown field `")
    wrong = rest.partition("`")[0]
    sections = (
        Config,
        DeviceConfig,
        LeaseConfig,
        QueueConfig,
        PackingConfig,
        SuspendConfig,
        NotifyConfig,
        WebConfig,
        SlurmConfig,
        RayConfig,
    )
    known = [name for section in sections for name in section.__struct_fields__]
    near = difflib.get_close_matches(wrong, known, n=1) if found else []
    return f"did you mean `{near[0]}`?" if near else None
