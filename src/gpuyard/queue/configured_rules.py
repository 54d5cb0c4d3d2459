"""What the configuration file says about the queue, and the gates of the host, which apply its limits."""

import os
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import asdict, replace

from gpuyard.config import DeviceConfig, HostConfig, load_config
from gpuyard.model.energy import EnergyPrice
from gpuyard.model.machine_snapshot import Sample
from gpuyard.policy.estimates import sureness_of
from gpuyard.policy.foreign_load import is_above, is_below
from gpuyard.policy.machine import Packing
from gpuyard.policy.sizing import FirstRuns
from gpuyard.policy.wait_reasons import Reason, ReasonKind, over
from gpuyard.policy.world import SchedulingLimits


class Rules(Struct, frozen=True, kw_only=True):
    """Settings of the scheduler."""

    limits: SchedulingLimits
    max_cpu_percent: float | None = None
    min_free_memory_mb: float | None = None
    packing: Packing = Packing()
    shares_first_runs: bool = (
        True  # a job without an estimate shares a device from its start; else it is alone at first
    )
    ram_reserve_mb: float = 2048.0  # that has to stay free when a job is suspended
    engine: str = ""  # of jobs that name none
    devices: DeviceConfig = DeviceConfig()
    host: HostConfig = HostConfig()
    secret_names: tuple[str, ...] = ()  # patterns of further variables (`model/shell_environment.py`)
    unbuffers_python: bool = True  # jobs get PYTHONUNBUFFERED=1 if they have no such variable
    stops_preallocation: bool = False  # jobs get variables that keep JAX and TensorFlow from taking a whole device
    energy_price: EnergyPrice = EnergyPrice()

    @property
    def first_runs(self) -> FirstRuns:
        return FirstRuns(share=self.shares_first_runs, sureness=self.packing.sureness)


class HostGates:
    """No job starts while CPU load is too high or free RAM too low. A closed gate opens again by a margin."""

    def __init__(self) -> None:
        self._is_cpu_closed = self._is_memory_closed = False

    def closed_reasons(self, sample: Sample, rules: Rules) -> Iterator[Reason]:
        """Update both gates and yield a reason for each closed one."""
        cpu, most = sample.cpu_percent, rules.max_cpu_percent
        self._is_cpu_closed = is_above(cpu, most, 5.0, was_above=self._is_cpu_closed)
        if self._is_cpu_closed:
            remedy = "max_cpu_percent under [queue] in config.toml limits all jobs"
            yield replace(over(ReasonKind.HOST_TOO_BUSY, cpu, most), remedy=remedy)
        available, least = sample.snapshot.host.memory_available_mb, rules.min_free_memory_mb
        self._is_memory_closed = is_below(available, least, 128.0, was_below=self._is_memory_closed)
        if self._is_memory_closed:
            text = f"{available or 0.0:.0f} MB of RAM available < {least or 0.0:.0f} MB"
            remedy = "min_free_memory_mb under [queue] in config.toml limits all jobs"
            yield Reason(ReasonKind.HOST_TOO_FULL, text, remedy=remedy)


def read_rules() -> Rules:
    """Return the scheduling rules of the configuration file as it is now."""
    config = load_config()
    queue, packing = config.queue, config.packing
    return Rules(
        limits=SchedulingLimits(cpu_jobs=queue.cpu_jobs or os.cpu_count() or 1, tags=dict(queue.tags)),
        max_cpu_percent=queue.max_cpu_percent,
        min_free_memory_mb=queue.min_free_memory_mb or None,
        packing=Packing(
            max_jobs_per_device=packing.max_jobs_per_device,
            max_load_percent=packing.max_load_percent or None,
            min_gain_percent=packing.min_gain_percent,
            max_foreign_load_percent=queue.max_foreign_load_percent,
            sureness=sureness_of(packing.quantile),
        ),
        shares_first_runs=packing.first_run == "share",
        ram_reserve_mb=config.suspend.ram_reserve_mb,
        engine=queue.engine,
        devices=config.devices,
        host=config.host,
        secret_names=config.keep.secret_names,
        unbuffers_python=queue.python_unbuffered,
        stops_preallocation=packing.preallocation == "off",
        energy_price=EnergyPrice(**asdict(config.energy)),
    )
