"""The module names that existing scripts import; the code is in gpuyard.scripting."""

from gpu_scheduler import gpu_info
from gpuyard import (
    GPUScheduler,
    find_free_gpus,
    get_gpu_info,
    get_gpu_memory_usage,
    get_gpu_names,
    get_gpu_power_usage,
    get_gpu_utilization,
    get_total_num_gpus,
)

__all__ = [
    "GPUScheduler",
    "find_free_gpus",
    "get_gpu_info",
    "get_gpu_memory_usage",
    "get_gpu_names",
    "get_gpu_power_usage",
    "get_gpu_utilization",
    "get_total_num_gpus",
    "gpu_info",
]
