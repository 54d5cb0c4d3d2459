"""The configuration file, and the directories that gpuyard uses.

`GPUYARD_HOME=DIR` puts everything into one directory, so that a trial or a test touches nothing else. The file is
`config.toml` there, or in the platform's configuration directory; docs/reference/configuration.md explains each key."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gpuyard.errors import EnvironmentFault, GpuyardError, UserError
from gpuyard.model.machine_snapshot import Snapshot, Vendor
from gpuyard.model.subscriptions import check_target, parse_event
from gpuyard.model.units import parse_duration, parse_size
from gpuyard.policy.device_names import banned_ids
from gpuyard.policy.host_room import HostLimits
from gpuyard.system.private_files import PrivateFileError, read_trusted
from gpuyard.system.user_directories import sharing_problem, state_directory, user_directory

LOCK_DIR = "GPUYARD_LOCK_DIR"
FOREVER = "forever"


def _parse(key: str, text: str, parse: Callable[[str], float], advice: str, *, has_unit: bool = False) -> float:
    """Return what `parse` makes of a setting. `has_unit`: a value other than 0 needs one."""
    try:
        value = parse(text)
    except UserError as error:
        raise ValueError(f"{key}: {error}; {advice}") from None
    if has_unit and value and not text.strip()[-1].isalpha():
        raise ValueError(f"{key} = '{text}' has no unit; {advice}")
    return value


def _parse_size(key: str, value: str | int, advice: str) -> float:
    """Return a size in MB; a number without quotes is in bytes."""
    return _parse(key, f"{value}B" if isinstance(value, int) else value, parse_size, advice)


def _parse_limit(key: str, text: str, parse: Callable[[str], float], least: float) -> float | None:
    if text == FOREVER:
        return None
    example, shortest = ("20G", "1M") if parse is parse_size else ("90d", "1h")
    advice = f'write it as "{example}", "{shortest}" at least, or "{FOREVER}" to keep all'
    value = _parse(key, text, parse, advice)
    if value < least:
        raise ValueError(f"{key} = '{text}' is too little; {advice}")
    return _parse(key, text, parse, advice, has_unit=True)


def _check_absolute(key: str, folder: str | None) -> None:
    if folder is not None and not os.path.isabs(os.path.expanduser(folder)):
        raise ValueError(f"{key} = '{folder}' is not an absolute path")


class DeviceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    banned: tuple[int | str, ...] = ()
    banned_names: tuple[str, ...] = ()
    visible: Literal["index", "uuid"] = "index"
    vendor: Vendor | None = None

    def banned_ids(self, snapshot: Snapshot) -> tuple[str, ...]:
        """Return the ids of the devices in this snapshot on which nothing starts."""
        return banned_ids(self.banned, self.banned_names, snapshot)


class LeaseConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    directory: str | None = None


class QueueConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cpu_jobs: Annotated[int, Meta(ge=1)] | None = None
    max_cpu_percent: Annotated[float, Meta(gt=0)] | None = None
    min_free_memory_mb: Annotated[float, Meta(ge=0)] = 512.0
    max_foreign_load_percent: Annotated[float, Meta(ge=0, le=100)] = 50.0
    tags: dict[str, Annotated[int, Meta(ge=0)]] = {}
    engine: str = "local"
    python_unbuffered: bool = True
    reach: Literal["ssh"] | None = None


class PackingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_jobs_per_device: Annotated[int, Meta(ge=1)] | None = None
    max_load_percent: Annotated[float, Meta(ge=0)] | None = None
    min_gain_percent: Annotated[float, Meta(ge=-100, le=100)] = 3.0
    first_run: Literal["share", "alone"] = "share"
    quantile: Annotated[float, Meta(ge=0.5, le=0.999)] = 0.9
    preallocation: Literal["keep", "off"] = "keep"


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


class KeepConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long finished jobs and their logs are kept; "forever" is no limit."""

    jobs: str = "90d"
    logs: str = FOREVER
    log_bytes: str | int = "20G"
    secret_names: tuple[str, ...] = ()
    snapshots: str = "7d"

    def __post_init__(self) -> None:
        _ = self.jobs_s, self.logs_s, self.most_log_mb, self.snapshots_s  # raise if they cannot be parsed

    # Less than an hour would delete jobs before a script that waits for them has seen their end.

    @property
    def jobs_s(self) -> float | None:
        """For how many seconds finished jobs are kept; None: without limit."""
        return _parse_limit("jobs", self.jobs, parse_duration, 3600.0)

    @property
    def logs_s(self) -> float | None:
        return _parse_limit("logs", self.logs, parse_duration, 3600.0)

    @property
    def snapshots_s(self) -> float | None:
        """For how many seconds the snapshot of a submission is kept after its last job has ended."""
        return _parse_limit("snapshots", self.snapshots, parse_duration, 0.0)

    @property
    def most_log_mb(self) -> float | None:
        """The size of all logs together; None: without limit."""
        text = f"{self.log_bytes}B" if isinstance(self.log_bytes, int) else self.log_bytes
        return _parse_limit("log_bytes", text, parse_size, 1.0)


class SubmitConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether submissions run in a snapshot of their code by default, its largest size, and where snapshots are."""

    snapshot: bool = False
    snapshot_size: str | int = "256M"
    snapshot_folder: str | None = None

    def __post_init__(self) -> None:
        _ = self.snapshot_size_mb  # raises if it cannot be parsed
        _check_absolute("snapshot_folder", self.snapshot_folder)

    @property
    def snapshot_size_mb(self) -> float:
        return _parse_size("snapshot_size", self.snapshot_size, 'write it as "256M"')


class ClusterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that all cluster engines have."""

    folder: str | None = None
    gpu_memory: str | None = None
    poll_s: Annotated[float, Meta(gt=0)] = 10.0

    def __post_init__(self) -> None:
        _check_absolute("folder", self.folder)
        _ = self.card_mb  # raises if it cannot be parsed

    @property
    def card_mb(self) -> float | None:
        return None if self.gpu_memory is None else _parse_size("gpu_memory", self.gpu_memory, 'write it as "80G"')


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


class ContainersConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tool: Literal["auto", "podman", "docker", "apptainer"] = "auto"
    options: tuple[str, ...] = ()


class HostConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the whole machine, and how its RAM and CPUs are used. Where
    `max_cpu_load` is not set, it is 100% for the CPUs that users declare, and no limit for those that were learned."""

    min_free_disk: str | int = "1G"
    max_gpu_power_w: Annotated[float, Meta(gt=0)] | None = None
    keep_free: str | None = None
    max_cpu_load: Annotated[float, Meta(gt=0, le=10_000)] | None = None
    enforce_ram: bool = False
    pin_cpus: bool = False

    def __post_init__(self) -> None:
        _ = self.min_free_disk_mb, self.keep_free_mb  # raise if they cannot be parsed

    @property
    def keep_free_mb(self) -> float | None:
        """The RAM that stays free in MB; None: by the size of the RAM."""
        advice = 'write a size such as "4G", or "0" for no floor'
        if self.keep_free is None:
            return None
        return _parse("keep_free", self.keep_free, parse_size, advice, has_unit=True)

    @property
    def limits(self) -> HostLimits:
        """What leases may reserve of the RAM and the CPUs."""
        return HostLimits(keep_free_mb=self.keep_free_mb, max_cpu_load_percent=self.max_cpu_load)

    @property
    def min_free_disk_mb(self) -> float:
        """The space that has to be free before jobs start; 0: no limit."""
        return _parse_size("min_free_disk", self.min_free_disk, 'write it as "1G", or "0" for no limit')


class EnergyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a kWh costs in `currency`, and how many grams of CO2e it causes. What is left out is not shown."""

    price: Annotated[float, Meta(ge=0)] | None = None
    currency: Annotated[str, Meta(min_length=1, max_length=8)] = "EUR"
    gco2_per_kwh: Annotated[float, Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if not self.currency.isprintable():
            raise ValueError('currency takes plain text, such as "EUR"')


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    devices: DeviceConfig = DeviceConfig()
    leases: LeaseConfig = LeaseConfig()
    queue: QueueConfig = QueueConfig()
    packing: PackingConfig = PackingConfig()
    suspend: SuspendConfig = SuspendConfig()
    notify: NotifyConfig = NotifyConfig()
    slurm: SlurmConfig = SlurmConfig()
    ray: RayConfig = RayConfig()
    containers: ContainersConfig = ContainersConfig()
    web: bool | WebConfig = False
    keep: KeepConfig = KeepConfig()
    host: HostConfig = HostConfig()
    energy: EnergyConfig = EnergyConfig()
    submit: SubmitConfig = SubmitConfig()

    @property
    def page(self) -> WebConfig:
        return self.web if isinstance(self.web, WebConfig) else WebConfig(enabled=self.web)


class _Tolerance:
    """Whether a faulty file raises an error or is reported, and the last settings that were read."""

    report: Callable[[GpuyardError], None] | None = None
    config = Config()
    fault: str | None = None


def tolerate_faults(report: Callable[[GpuyardError], None]) -> None:
    """From now on, `load_config` reports a file that cannot be read, once, and returns the settings that it read
    before, else the defaults. For the daemon, and for commands that only show."""
    _Tolerance.report = report


def load_config() -> Config:
    try:
        _Tolerance.config, _Tolerance.fault = check_config(), None
    except GpuyardError as error:
        if _Tolerance.report is None:
            raise
        if str(error) != _Tolerance.fault:
            _Tolerance.fault = str(error)
            _Tolerance.report(error)
    return _Tolerance.config


def config_fault() -> str | None:
    """Return what `load_config` found wrong in the file the last time, and tolerated."""
    return _Tolerance.fault


def check_config() -> Config:
    """Return the settings of the file as it is. Raises UserError, with the line and the key, or EnvironmentFault."""
    path = config_dir() / "config.toml"
    content = b""
    try:
        content = read_trusted(str(path))
        import tomllib  # takes 3 ms, and most users have no such file

        text = content.decode()
        return parse_config(tomllib.loads(text), path, text)
    except FileNotFoundError:
        return Config()
    except PrivateFileError as error:
        raise UserError(f"the configuration is not read: {error}", hint=error.hint) from error
    except OSError as error:  # its mode, or no file can be opened now
        hint = "see its owner and mode, and the limit on open files (ulimit -n)"
        raise EnvironmentFault(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    except ValueError as error:  # no UTF-8, or no TOML
        from gpuyard.config_errors import explain_syntax

        raise UserError(explain_syntax(path, content.decode(errors="replace"), error)) from error


def config_stamp() -> int | None:
    """Return a number that changes with the file, or None if there is no file."""
    try:
        return os.stat(f"{user_directory('XDG_CONFIG_HOME', '~/.config')}/config.toml").st_mtime_ns
    except OSError:
        return None


class CurrentBans:
    """The bans in the configuration file as it is at each call. While it cannot be read, the bans before stay."""

    def __init__(self) -> None:
        self._stamp = config_stamp()
        self._devices = load_config().devices

    def ids(self, snapshot: Snapshot) -> tuple[str, ...]:
        stamp = config_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            with contextlib.suppress(GpuyardError):
                self._devices = check_config().devices
        return self._devices.banned_ids(snapshot)


def parse_config(raw: dict[str, Any], path: Path, text: str = "") -> Config:
    """Return the settings. Raises UserError, with the line of the key in `text`."""
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        from gpuyard.config_errors import explain_value

        raise UserError(explain_value(path, text, Config, error)) from error


def lease_dir() -> Path:
    """Return GPUYARD_LOCK_DIR, the configured directory, or this user's own directory, in that order."""
    named = os.environ.get(LOCK_DIR) or load_config().leases.directory
    if named:
        path = Path(named).expanduser()
        if not path.is_absolute():
            hint = "give an absolute path: a relative one would name another ledger in each working directory"
            raise UserError(f"the lease directory '{named}' is not an absolute path", hint=hint)
        return path
    own = Path.home() / ".gpu_locks"
    is_local = not os.environ.get("GPUYARD_HOME") and sharing_problem(str(own)) is None
    return own if is_local else state_dir() / "locks"


def config_dir() -> Path:
    return Path(user_directory("XDG_CONFIG_HOME", "~/.config"))


def state_dir() -> Path:
    """Return the directory for files that must survive a reboot, on a local disk."""
    return Path(state_directory())


def simulated_devices() -> str | None:
    """Return GPUYARD_SIMULATE, such as `2x24GB`, if simulated devices are to be used in place of real ones."""
    return os.environ.get("GPUYARD_SIMULATE") or None


def simulated_host() -> str | None:
    """Return GPUYARD_SIMULATE_HOST, such as `23GB` or `23GB,8`, if the RAM and CPUs of the machine are simulated."""
    return os.environ.get("GPUYARD_SIMULATE_HOST") or None
