"""The expected devices of each real output of `nvidia-smi`, read by eye; see test_real_samples."""

_MASKED = "GPU-00000000-0000-0000-0000-000000000000"
_UNSEEN = {"power_limit_w": None, "temperature_c": None, "utilization_percent": None, "memory_total_mb": None}


_FIGURES = (
    "memory_total_mb",
    "memory_used_mb",
    "memory_free_mb",
    "utilization_percent",
    "power_draw_w",
    "power_limit_w",
    "temperature_c",
)


def _card(name: str, *figures: float | None, **more: object) -> dict[str, object]:
    return {"name": name, "fault": None, **dict(zip(_FIGURES, figures, strict=True)), **more}


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
}
