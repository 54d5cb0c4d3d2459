"""The scheduling rules of the configuration file."""

import os

from msgspec.structs import asdict

from gpuyard.config import load_config
from gpuyard.control.rules import Rules
from gpuyard.core.memory.expected_peak import sureness_of
from gpuyard.core.report.energy import EnergyPrice
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.world import SchedulingLimits


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
        min_free_disk_mb=config.host.min_free_disk_mb,
        max_gpu_power_w=config.host.max_gpu_power_w,
    )
