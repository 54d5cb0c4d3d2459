"""The expected devices of recorded outputs of Intel's tools, read by eye."""

_UNTOLD: dict[str, object] = {
    "name": None,
    "pci_bus_id": None,
    "memory_total_mb": None,
    "memory_free_mb": None,
    "power_limit_w": None,
}

EXPECTED: dict[str, list[dict[str, object]]] = {
    # Cut within its second engine, whose `busy` (0.045732) is complete.
    "intel_gpu_top/intel_gpu_top-J__a310-no-power-truncated.txt": [
        {
            **_UNTOLD,
            "id": "intel-0",
            "utilization_percent": 0.05,
            "power_draw_w": None,
            "memory_used_mb": None,
            "temperature_c": None,
            "processes": None,
        }
    ],
    "intel_gpu_top/intel_gpu_top-J__dg2-arc-no-power-truncated.txt": [
        {
            **_UNTOLD,
            "id": "intel-0",
            "utilization_percent": 48.97,
            "power_draw_w": None,
            "memory_used_mb": None,
            "temperature_c": None,
            "processes": None,
        }
    ],
    "intel_gpu_top/intel_gpu_top-J__gpustat-unraid.txt": [
        {
            **_UNTOLD,
            "id": "intel-0",
            "utilization_percent": 0.0,
            "power_draw_w": 0.0,
            "memory_used_mb": None,
            "temperature_c": None,
            "processes": None,
        }
    ],
    "xpu-smi/xpu-smi-dump__a770-NA.txt": [
        {
            **_UNTOLD,
            "id": f"intel-{index}",
            "index": index,
            "utilization_percent": None,
            "memory_used_mb": used,
            "power_draw_w": None,
            "temperature_c": None,
            "processes": None,
        }
        for index, used in enumerate((17.52, 17.52, 49.21, 17.52))
    ],
    "xpu-smi/xpu-smi-dump__windows.txt": [
        {
            **_UNTOLD,
            "id": "intel-0",
            "index": 0,
            "utilization_percent": 0.0,
            "power_draw_w": 51.0,
            "memory_used_mb": None,
            "temperature_c": None,
            "processes": None,
        }
    ],
}
