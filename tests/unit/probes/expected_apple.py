"""The expected devices of each saved output of the Apple tools, read by eye."""

_POWERMETRICS_UNKNOWN: dict[str, object] = {
    "vendor": "apple",
    "id": "apple-gpu-0",
    "index": 0,
    "memory_total_mb": None,
    "memory_used_mb": None,
    "memory_free_mb": None,
    "power_limit_w": None,
    "temperature_c": None,
    "fault": None,
    "processes": None,
}
_IOREG_UNKNOWN: dict[str, object] = {
    "vendor": "apple",
    "id": "apple-gpu-0",
    "index": 0,
    "memory_total_mb": None,
    "memory_free_mb": None,
    "power_draw_w": None,
    "power_limit_w": None,
    "temperature_c": None,
    "fault": None,
    "processes": None,
}

EXPECTED: dict[str, list[dict[str, object]]] = {
    # idle_ratio 0.824005; processor.gpu_power 26.3147 mW
    "powermetrics/powermetrics-plist__hog-m1pro-trimmed.txt": [
        {
            **_POWERMETRICS_UNKNOWN,
            "name": "Apple GPU (MacBookPro18,3)",
            "utilization_percent": 17.6,
            "power_draw_w": 0.0263,
        }
    ],
    # the fifth and last document: idle_ratio 0.960673; 126 mJ in 5.0091785 s
    "powermetrics/powermetrics-plist__matiasinsaurralde-gpu_power-multi.txt": [
        {
            **_POWERMETRICS_UNKNOWN,
            "name": "Apple GPU (Mac16,8)",
            "utilization_percent": 3.93,
            "power_draw_w": 0.0252,
        }
    ],
    # idle_ratio 0.995324; 9 mJ in 5.005449083 s
    "powermetrics/powermetrics-plist__matiasinsaurralde-gpu_power.txt": [
        {
            **_POWERMETRICS_UNKNOWN,
            "name": "Apple GPU (Mac16,8)",
            "utilization_percent": 0.47,
            "power_draw_w": 0.0018,
        }
    ],
    # one sample out of the middle of a log, without its head; 7539 mW is in the processor's section
    # only the memory of the driver is reported, which is another figure
    "ioreg/ioreg-IOAccelerator__m2pro-no-inuse.txt": [
        {
            **_IOREG_UNKNOWN,
            "name": "AGXAcceleratorG14X",
            "utilization_percent": 31.0,
            "memory_used_mb": None,
        }
    ],
    # 2363801600 bytes in use; the node's head was cut off
    "ioreg/ioreg-IOAccelerator__m4max-perfstats-line.txt": [
        {
            **_IOREG_UNKNOWN,
            "name": None,
            "utilization_percent": 16.0,
            "memory_used_mb": 2254.3,
        }
    ],
    # 54969483264 bytes in use
    "ioreg/ioreg-IOAccelerator__m5max.txt": [
        {
            **_IOREG_UNKNOWN,
            "name": "Apple M5 Max",
            "utilization_percent": 87.0,
            "memory_used_mb": 52422.98,
        }
    ],
}
