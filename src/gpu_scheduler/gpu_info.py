"""The module names that existing scripts import; the code is in gpuyard.scripting."""

from gpuyard import (
    BANNED_GPU_NAMES,
    BANNED_GPUS,
    find_free_gpus,
    get_gpu_info,
    get_gpu_memory_usage,
    get_gpu_names,
    get_gpu_power_usage,
    get_gpu_utilization,
    get_total_num_gpus,
)

__all__ = [
    "BANNED_GPUS",
    "BANNED_GPU_NAMES",
    "find_free_gpus",
    "get_gpu_info",
    "get_gpu_memory_usage",
    "get_gpu_names",
    "get_gpu_power_usage",
    "get_gpu_utilization",
    "get_total_num_gpus",
]
