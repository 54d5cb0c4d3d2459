"""Small outputs of Intel's tools, written for the tests in the formats of several releases."""

TOP_OLD = """
[
{
	"period": {
		"duration": 0.004817,
		"unit": "ms"
	},
	"power": {
		"value": 0.000000,
		"unit": "W"
	},
	"engines": {
		"Render/3D/0": {
			"busy": 0.000000,
			"sema": 0.000000,
			"wait": 0.000000,
			"unit": "%"
		},
		"Blitter/0": {
			"busy": 0.000000,
			"sema": 0.000000,
			"wait": 0.000000,
			"unit": "%"
		}
	}
},
{
	"period": {
		"duration": 250.116221,
		"unit": "ms"
	},
	"power": {
		"value": 4.250000,
		"unit": "W"
	},
	"engines": {
		"Render/3D/0": {
			"busy": 12.500000,
			"sema": 0.000000,
			"wait": 0.000000,
			"unit": "%"
		},
		"Blitter/0": {
			"busy": 37.250000,
			"sema": 0.000000,
			"wait": 0.000000,
			"unit": "%"
		}
	}
}
"""

TOP_NEW = """[
{
	"period": { "duration": 18.201334, "unit": "ms" },
	"frequency": { "requested": 600.000000, "actual": 450.000000, "unit": "MHz" },
	"interrupts": { "count": 210.500000, "unit": "irq/s" },
	"rc6": { "value": 40.000000, "unit": "%" },
	"power": { "GPU": 3.125000, "Package": 21.500000, "unit": "W" },
	"engines": {
		"Render/3D": { "busy": 61.500000, "sema": 0.000000, "wait": 0.000000, "unit": "%" },
		"Video": { "busy": 8.000000, "sema": 0.000000, "wait": 0.000000, "unit": "%" }
	},
	"clients": {
		"11": {
			"name": "blender",
			"pid": "4100",
			"memory": {
				"system": { "total": "104857600", "shared": "0", "resident": "104857600" },
				"local0": { "total": "838860800", "shared": "0", "resident": "524288000" }
			},
			"engine-classes": { "Render/3D": { "busy": "61.500000", "unit": "%" } }
		},
		"12": {
			"name": "blender",
			"pid": "4100",
			"memory": { "local0": { "total": "104857600", "shared": "0", "resident": "104857600" } }
		},
		"15": {
			"name": "Xwayland",
			"pid": "2001",
			"memory": { "system": { "total": "8388608", "shared": "0", "resident": "8388608" } }
		}
	}
}
"""

TOP_ARC = """{
	"period": { "duration": 1002.3, "unit": "ms" },
	"engines": {
		"Render/3D": { "busy": 3.0, "unit": "%" },
		"Compute": { "busy": 91.333, "unit": "%" }
	},
	"clients": {
	}
}
"""

DUMP_NEW = """\
Timestamp, DeviceId, GPU Utilization (%), GPU Power (W), \
GPU Core Temperature (Celsius Degree), GPU Memory Used (MiB)
09:10:11.000,    0, 35.50, 88.25, 61.00, 2048.50
09:10:11.000,    1,  N/A, 31.00,  N/A, 17.25
09:10:12.000,    0, 70.25, 91.50, 63.00, 4096.75
09:10:12.000,    1,  N/A, 32.00,  N/A, 17.25
"""

DUMP_2 = """\
Timestamp, DeviceId, utilization.gpu (%), power.draw (W), temperature.gpu (C), memory.used (MiB)
09:10:12.000, 0, 70.25, 91.50, 63, 4096.75
09:10:12.000, 1, N/A, 32.00, N/A, 17.25
"""


DISCOVERY_JSON = """{
    "device_list": [
        {
            "device_id": 0,
            "device_name": "Intel(R) Data Center GPU Flex 170",
            "device_type": "GPU",
            "pci_bdf_address": "0000:4D:00.0",
            "pci_device_id": "0x56c0",
            "uuid": "00000000-0000-004d-0000-000056c08086",
            "vendor_name": "Intel(R) Corporation"
        },
        {
            "device_id": 1,
            "device_name": "Intel(R) Arc(TM) A770 Graphics",
            "pci_bdf_address": "0000:9a:00.0",
            "memory_physical_size_byte": "17079205888"
        }
    ]
}
"""

DISCOVERY_CSV = """Device ID,Device Name,UUID,PCI BDF Address,Memory Physical Size
0,"Intel(R) Arc(TM) A310 LP Graphics","00000000-0000-0003-0000-000056a68086","0000:03:00.0","N/A"
1,"Intel(R) Data Center GPU Flex 170","00000000-0000-004d-0000-000056c08086","0000:4d:00.0","14260.97 MiB"
"""


PS_JSON = """{
    "device_util_by_proc_list": [
        { "device_id": 0, "mem_size": 1048576, "process_id": 3010, "process_name": "python3", "shared_mem_size": 0 },
        { "device_id": 0, "mem_size": 1966, "process_id": 5151, "process_name": "xpu-smi", "shared_mem_size": 0 }
    ]
}
"""


SAMPLES: dict[str, list[str]] = {
    "intel_gpu_top": [TOP_OLD, TOP_NEW, TOP_ARC, TOP_NEW[:700]],
    "xpu-smi": [DUMP_NEW, DUMP_2, DISCOVERY_JSON, DISCOVERY_CSV, PS_JSON],
}
