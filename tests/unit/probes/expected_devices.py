"""The expected devices of real outputs of the vendors' tools, read by eye: file -> devices; see test_real_samples."""

_MASKED = "GPU-00000000-0000-0000-0000-000000000000"
_UNSEEN = {"power_limit_w": None, "temperature_c": None, "utilization_percent": None, "memory_total_mb": None}

_FIGURES = (
    "memory_total_mb", "memory_used_mb", "memory_free_mb", "utilization_percent", "power_draw_w", "power_limit_w",
    "temperature_c",
)  # fmt: skip


def _device(like: dict[str, object], *figures: float | None, **more: object) -> dict[str, object]:
    """Return a device with these figures, in order; figures that are not given are unknown."""
    return {**like, **dict.fromkeys(_FIGURES), **dict(zip(_FIGURES, figures, strict=False)), **more}


def _amd(*figures: float | None, **more: object) -> dict[str, object]:
    unknown = dict.fromkeys(("index", "name", "parent", "pci_bus_id", "processes", "fault"))
    return _device({"vendor": "amd", **unknown}, *figures, **more)


def _intel(*figures: float | None, **more: object) -> dict[str, object]:
    return _device({"id": "intel-0", "name": None, "pci_bus_id": None, "processes": None}, *figures, **more)


def _apple(*figures: float | None, **more: object) -> dict[str, object]:
    known = {"vendor": "apple", "id": "apple-gpu-0", "index": 0}
    return _device({**known, "fault": None, "processes": None}, *figures, **more)


def _card(name: str, *figures: float | None, **more: object) -> dict[str, object]:
    return _device({"name": name, "fault": None}, *figures, **more)


def _apps(name: str, *processes: tuple[int, float | None]) -> list[dict[str, object]]:
    return [{"id": _MASKED, "name": name, "processes": list(processes), "memory_used_mb": None}]


_SUPER = "NVIDIA GeForce RTX 2080 SUPER"
_WINDOWS_IDLE = (12444, 15076, 2056, 12332, 20372, 4680, 14160, 14184, 16280, 24804)

_XML: dict[str, list[dict[str, object]]] = {
    "qx__a10g": [_card("NVIDIA A10G", 23028, 22, 22569, 0, 25.58, 300, 17, processes=[(725, 22)], index=0)],
    "qx__gpustat-unraid-quadro-p4000-440": [
        _card("Quadro P4000", 8119, 10, 8109, 0, 30.86, 105, 61, processes=[], pci_bus_id="0000:08:00.0")
    ],
    "qx__netdata-a100-sxm4-mig": [
        _card(
            "NVIDIA A100-SXM4-40GB", 40960, 38, 40315, None, 66.92, 400, 36,
            id="GPU-27b94a00-ed54-5c24-b1fd-1054085de32a", parent=None, processes=[],
        ),
        {
            "id": "MIG-GPU-27b94a00-ed54-5c24-b1fd-1054085de32a/1/0",
            "parent": "GPU-27b94a00-ed54-5c24-b1fd-1054085de32a",
            "index": 0,
            "memory_total_mb": 19968,
            "memory_used_mb": 19,
            "memory_free_mb": 19948,
            "utilization_percent": None,
            "power_draw_w": None,
        },
        {
            "id": "MIG-GPU-27b94a00-ed54-5c24-b1fd-1054085de32a/2/0",
            "parent": "GPU-27b94a00-ed54-5c24-b1fd-1054085de32a",
            "index": 1,
            "memory_total_mb": 19968,
            "memory_used_mb": 19,
            "memory_free_mb": 19948,
        },
    ],
    "qx__netdata-rtx-2080-win": [_card("NVIDIA GeForce RTX 2080", 8192, 862, 7147, 2, 14.5, 275, 29)],
    "qx__netdata-rtx-3060": [
        _card("NVIDIA GeForce RTX 3060 Laptop GPU", 6144, 5, 5940, 0, 8.7, None, 45, processes=[(28543, 4)])
    ],
    "qx__netdata-rtx-4090-driver-535": [_card("NVIDIA GeForce RTX 4090", 24564, 2, 24214, 0, 26.84, 450, 40)],
    "qx__netdata-rtx-pro-6000-driver-580": [
        _card("NVIDIA RTX PRO 6000 Blackwell", None, None, None, None, 66.84, None, 37, processes=None)
    ],
    "qx__netdata-tesla-p100": [_card("Tesla P100-PCIE-16GB", 16384, 0, 16280, 0, 26.16, 250, 38, processes=[])],
    "qx__rtx-3060-v12": [_card("NVIDIA GeForce RTX 3060", 12288, 116, 11806, 0, 11.6, 170, 42)],
    "qx__rtx-3090-v12": [_card("NVIDIA GeForce RTX 3090", 24576, 1, 24258, 0, 27.23, 200, 37)],
}  # fmt: skip

_CSV: dict[str, list[dict[str, object]]] = {
    "query-gpu-csv-noheader-nounits__all-NA": [{"name": None, "memory_used_mb": None, "power_draw_w": None, **_UNSEEN}],
    "query-gpu-csv-noheader-nounits__util-NA-a100-mig": [
        _card("NVIDIA GeForce RTX 3050 Ti Laptop GPU", 4096, 12, None, 26.3, 12.73, None, 48, index=0),
        _card("NVIDIA A100-PCIE-40GB", 40960, 74, None, None, 36.79, None, 38, index=1),
    ],
    "query-gpu-csv__linux-x86_64__nvidia-geforce-rtx-2080-super__595.71.05__idle": [
        _card(_SUPER, 8192, 214, 7571, 0, 39.32, 250, 40, id=_MASKED, pci_bus_id="0000:0c:00.0", index=0)
    ],
    "query-gpu-csv__linux-x86_64__nvidia-geforce-rtx-2080-super__595.71.05__load": [
        _card(_SUPER, 8192, 819, 6967, 8, 111.5, 250, 45)
    ],
    "query-gpu-csv__linux-x86_64__nvidia-geforce-rtx-2080-super__610.57.04__idle": [
        _card(_SUPER, 8192, 211, 7582, 0, 39.17, 250, 33)
    ],
    "query-gpu-csv__linux-x86_64__nvidia-geforce-rtx-4080-super__595.71.05__idle": [
        _card("NVIDIA GeForce RTX 4080 SUPER", 16376, 596, 15348, 0, 26.2, 320, 43)
    ],
    "query-gpu-csv__linux-x86_64__nvidia-geforce-rtx-4080-super__595.71.05__load": [
        _card("NVIDIA GeForce RTX 4080 SUPER", 16376, 1474, 14470, 7, 84.24, 320, 46)
    ],
    "query-gpu-csv__linux-x86_64__nvidia-h100-mig__590.48.01__load": [
        _card("NVIDIA H100 80GB HBM3", 81559, 11125, 69956, None, 433.78, 700, 53)
    ],
    "query-gpu-csv__linux-x86_64__nvidia-h200-mig__590.48.01__idle": [
        _card("NVIDIA H200", 143771, 55, 143103, None, 78.28, 700, 28)
    ],
    "query-gpu-csv__linux-x86_64__nvidia-h200-mig__590.48.01__load": [
        _card("NVIDIA H200", 143771, 16959, 126199, None, 295.01, 700, 36)
    ],
    "query-gpu-csv__linux-x86_64__nvidia-l40s__595.80__load": [
        _card("NVIDIA L40S", 46068, 1235, 44225, 9, 110.23, 350, 54)
    ],
    "query-gpu-csv__windows-x86_64__nvidia-geforce-rtx-2080-super__610.62__idle": [
        _card(_SUPER, 8192, 797, 7191, 0, 39.25, 250, 40)
    ],
}

_APPS: dict[str, list[dict[str, object]]] = {
    "linux-x86_64__nvidia-geforce-rtx-2080-super__595.71.05__idle": [],
    "linux-x86_64__nvidia-geforce-rtx-2080-super__595.71.05__load": _apps(_SUPER, (5268, 370), (5267, 230)),
    "linux-x86_64__nvidia-geforce-rtx-2080-super__610.57.04__load": _apps(_SUPER, (28512, 370), (28511, 230)),
    "linux-x86_64__nvidia-geforce-rtx-4080-super__595.71.05__idle": _apps("NVIDIA GeForce RTX 4080 SUPER", (2165, 25)),
    "linux-x86_64__nvidia-h100-mig__590.48.01__idle": [],
    "linux-x86_64__nvidia-h200__590.48.01__idle": [],
    "linux-x86_64__nvidia-h200__590.48.01__load": _apps("NVIDIA H200", (10291, 2566), (10293, 1542), (10309, 28234)),
    "linux-x86_64__nvidia-l40s__595.80__idle": [],
    "linux-x86_64__nvidia-l40s__595.80__load": _apps("NVIDIA L40S", (20037, 538), (20038, 681)),
    "windows-x86_64__nvidia-geforce-rtx-2080-super__591.86__idle": _apps(
        _SUPER, *((pid, None) for pid in _WINDOWS_IDLE)
    ),
    "windows-x86_64__nvidia-geforce-rtx-2080-super__591.86__load": _apps(
        _SUPER, *((pid, None) for pid in (*_WINDOWS_IDLE, 25704, 26660))
    ),
}

EXPECTED: dict[str, list[dict[str, object]]] = {
    **{f"nvidia-smi-xml/{name}.txt": devices for name, devices in _XML.items()},
    **{f"nvidia-smi-csv/{name}.txt": devices for name, devices in _CSV.items()},
    **{f"nvidia-smi-apps/query-compute-apps__{name}.txt": devices for name, devices in _APPS.items()},
    "nvidia-smi-error/error__device-handle-unknown.txt": [{"id": "0000:09:00.0", "fault": "Unknown Error", **_UNSEEN}],
    "nvidia-smi-error/error__fallen-off-bus.txt": [
        {"id": "0000:01:00.0", "fault": "GPU has fallen off the bus.", **_UNSEEN}
    ],
    "amd-smi/amd-smi-metric-json__rocm7-gpu_data-30GB.txt": [
        _amd(30576.0, 20450.0, 10126.0, 91.0, 264.0, None, 54.0, index=0, id="amd-0"),
    ],
    "amd-smi/amd-smi-metric-u-json__rocm6-bare-list-w7700.txt": [_amd(None, None, None, 42.0, index=0, id="amd-0")],
    "amd-smi/amd-smi-process-json__r9700-rocm7.2.0.txt": [
        _amd(index=0, processes=[(213534, 0.05), (213890, 0.05), (213952, 20035.67), (213953, 19553.94)], id="amd-0"),
    ],
    "radeontop/radeontop-d-l1__frigate-stderr-mixed.txt": [
        _amd(487.06, 294.04, 193.02, 4.17, pci_bus_id="0000:10:00.0", id="0000:10:00.0"),
    ],
    "rocm-smi/rocm-smi-a-json__wandb-mi250-rocm5.txt": [
        _amd(None, None, None, 10.0, 89.0, 560.0, 32.0, index=0, name="AMD INSTINCT MI250 (MCM) OAM AC MBA",
            pci_bus_id="0000:2f:00.0", id="GPU-719d230578348e8c#0"),
        _amd(None, None, None, 20.0, 89.0, 560.0, 32.0, index=1, name="AMD INSTINCT MI250 (MCM) OAM AC MBA",
            pci_bus_id="0000:2f:00.0", id="GPU-719d230578348e8c#1"),
    ],
    "rocm-smi/rocm-smi-json__beszel-rembrandt-navi31.txt": [
        _amd(512.0, 459.92, 52.08, 0.0, 9.215, None, 47.0, index=0, name="Rembrandt [Radeon 680M]", id="amd-0"),
        _amd(24560.0, 757.54, 23802.46, 20.3, 19.0, None, 49.0, index=1, name="Navi 31 [Radeon RX 7900 XT]",
            id="amd-1"),
    ],
    "rocm-smi/rocm-smi-json__rx6700xt_rocm430.txt": [
        _amd(12272.0, 1547.55, 10724.45, 0.0, 6.0, 211.0, 45.0, index=0, pci_bus_id="0000:07:00.0", id="0000:07:00.0"),
    ],
    "rocm-smi/rocm-smi-json__rx6700xt_rocm602.txt": [
        _amd(12272.0, 1499.9, 10772.1, 0.0, None, 211.0, 45.0, index=0,
            name="Navi 22 [Radeon RX 6700/6700 XT / 6800M]", pci_bus_id="0000:07:00.0", id="0000:07:00.0"),
    ],
    "rocm-smi/rocm-smi-json__vega-10-XT.txt": [
        _amd(16368.0, 16.95, 16351.05, 0.0, 15.0, 170.0, 39.0, index=0, pci_bus_id="0000:04:00.0",
            id="GPU-02150e7d042a1124"),
    ],
    "rocm-smi/rocm-smi-json__vega-20-WKS-GL-XE.txt": [
        _amd(32752.0, 10.35, 32741.65, 0.0, 26.0, 225.0, 36.0, index=0, name="Radeon Instinct MI50 32GB",
            pci_bus_id="0000:63:00.0", id="GPU-02f048617326b1ea"),
    ],
    "intel_gpu_top/intel_gpu_top-J__a310-no-power-truncated.txt": [_intel(None, None, None, 0.05)],
    "intel_gpu_top/intel_gpu_top-J__dg2-arc-no-power-truncated.txt": [_intel(None, None, None, 48.97)],
    "intel_gpu_top/intel_gpu_top-J__gpustat-unraid.txt": [_intel(None, None, None, 0.0, 0.0)],
    "xpu-smi/xpu-smi-dump__a770-NA.txt": [
        _intel(None, 17.52, index=0),
        _intel(None, 17.52, id="intel-1", index=1),
        _intel(None, 49.21, id="intel-2", index=2),
        _intel(None, 17.52, id="intel-3", index=3),
    ],
    "xpu-smi/xpu-smi-dump__windows.txt": [_intel(None, None, None, 0.0, 51.0, index=0)],
    "powermetrics/powermetrics-plist__hog-m1pro-trimmed.txt": [
        _apple(None, None, None, 17.6, 0.0263, name="Apple GPU (MacBookPro18,3)"),
    ],
    "powermetrics/powermetrics-plist__matiasinsaurralde-gpu_power-multi.txt": [
        _apple(None, None, None, 3.93, 0.0252, name="Apple GPU (Mac16,8)"),
    ],
    "powermetrics/powermetrics-plist__matiasinsaurralde-gpu_power.txt": [
        _apple(None, None, None, 0.47, 0.0018, name="Apple GPU (Mac16,8)"),
    ],
    "ioreg/ioreg-IOAccelerator__m2pro-no-inuse.txt": [_apple(None, None, None, 31.0, name="AGXAcceleratorG14X")],
    "ioreg/ioreg-IOAccelerator__m4max-perfstats-line.txt": [_apple(None, 2254.3, None, 16.0, name=None)],
    "ioreg/ioreg-IOAccelerator__m5max.txt": [_apple(None, 52422.98, None, 87.0, name="Apple M5 Max")],
}  # fmt: skip
