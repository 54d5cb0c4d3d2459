"""The expected devices of real outputs of AMD's tools, read by eye: path in the samples folder -> dicts of devices."""

_UNKNOWN: dict[str, object] = {
    "vendor": "amd",
    "index": None,
    "name": None,
    "parent": None,
    "pci_bus_id": None,
    "memory_total_mb": None,
    "memory_used_mb": None,
    "memory_free_mb": None,
    "utilization_percent": None,
    "power_draw_w": None,
    "power_limit_w": None,
    "temperature_c": None,
    "processes": None,
    "fault": None,
}


_MI250_DIE: dict[str, object] = {
    **_UNKNOWN,
    "name": "AMD INSTINCT MI250 (MCM) OAM AC MBA",
    "pci_bus_id": "0000:2f:00.0",
    "power_draw_w": 89.0,
    "power_limit_w": 560.0,
    "temperature_c": 32.0,
}

_RX6700XT: dict[str, object] = {
    **_UNKNOWN,
    "id": "0000:07:00.0",
    "index": 0,
    "pci_bus_id": "0000:07:00.0",
    "memory_total_mb": 12272.0,
    "utilization_percent": 0.0,
    "power_limit_w": 211.0,
    "temperature_c": 45.0,
}


EXPECTED: dict[str, list[dict[str, object]]] = {
    "amd-smi/amd-smi-metric-json__rocm7-gpu_data-30GB.txt": [
        {
            **_UNKNOWN,
            "id": "amd-0",
            "index": 0,
            "memory_total_mb": 30576.0,
            "memory_used_mb": 20450.0,
            "memory_free_mb": 10126.0,
            "utilization_percent": 91.0,
            "power_draw_w": 264.0,
            "temperature_c": 54.0,
        },
    ],
    "amd-smi/amd-smi-metric-u-json__rocm6-bare-list-w7700.txt": [
        {**_UNKNOWN, "id": "amd-0", "index": 0, "utilization_percent": 42.0},
    ],
    "amd-smi/amd-smi-process-json__r9700-rocm7.2.0.txt": [
        {
            **_UNKNOWN,
            "id": "amd-0",
            "index": 0,
            "processes": [(213534, 0.05), (213890, 0.05), (213952, 20035.67), (213953, 19553.94)],
        },
    ],
    "radeontop/radeontop-d-l1__frigate-stderr-mixed.txt": [
        {
            **_UNKNOWN,
            "id": "0000:10:00.0",
            "pci_bus_id": "0000:10:00.0",
            "memory_total_mb": 487.06,
            "memory_used_mb": 294.04,
            "memory_free_mb": 193.02,
            "utilization_percent": 4.17,
        },
    ],
    "rocm-smi/rocm-smi-a-json__wandb-mi250-rocm5.txt": [
        {**_MI250_DIE, "id": "GPU-719d230578348e8c#0", "index": 0, "utilization_percent": 10.0},
        {**_MI250_DIE, "id": "GPU-719d230578348e8c#1", "index": 1, "utilization_percent": 20.0},
    ],
    "rocm-smi/rocm-smi-json__beszel-rembrandt-navi31.txt": [
        {
            **_UNKNOWN,
            "id": "amd-0",
            "index": 0,
            "name": "Rembrandt [Radeon 680M]",
            "memory_total_mb": 512.0,
            "memory_used_mb": 459.92,
            "memory_free_mb": 52.08,
            "utilization_percent": 0.0,
            "power_draw_w": 9.215,
            "temperature_c": 47.0,
        },
        {
            **_UNKNOWN,
            "id": "amd-1",
            "index": 1,
            "name": "Navi 31 [Radeon RX 7900 XT]",
            "memory_total_mb": 24560.0,
            "memory_used_mb": 757.54,
            "memory_free_mb": 23802.46,
            "utilization_percent": 20.3,
            "power_draw_w": 19.0,
            "temperature_c": 49.0,
        },
    ],
    "rocm-smi/rocm-smi-json__rx6700xt_rocm430.txt": [
        {**_RX6700XT, "memory_used_mb": 1547.55, "memory_free_mb": 10724.45, "power_draw_w": 6.0},
    ],
    "rocm-smi/rocm-smi-json__rx6700xt_rocm602.txt": [
        {
            **_RX6700XT,
            "name": "Navi 22 [Radeon RX 6700/6700 XT / 6800M]",
            "memory_used_mb": 1499.9,
            "memory_free_mb": 10772.1,
        },
    ],
    "rocm-smi/rocm-smi-json__vega-10-XT.txt": [
        {
            **_UNKNOWN,
            "id": "GPU-02150e7d042a1124",
            "index": 0,
            "pci_bus_id": "0000:04:00.0",
            "memory_total_mb": 16368.0,
            "memory_used_mb": 16.95,
            "memory_free_mb": 16351.05,
            "utilization_percent": 0.0,
            "power_draw_w": 15.0,
            "power_limit_w": 170.0,
            "temperature_c": 39.0,
        },
    ],
    "rocm-smi/rocm-smi-json__vega-20-WKS-GL-XE.txt": [
        {
            **_UNKNOWN,
            "id": "GPU-02f048617326b1ea",
            "index": 0,
            "name": "Radeon Instinct MI50 32GB",
            "pci_bus_id": "0000:63:00.0",
            "memory_total_mb": 32752.0,
            "memory_used_mb": 10.35,
            "memory_free_mb": 32741.65,
            "utilization_percent": 0.0,
            "power_draw_w": 26.0,
            "power_limit_w": 225.0,
            "temperature_c": 36.0,
        },
    ],
}
