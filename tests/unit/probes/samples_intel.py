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

DUMP_2_GROUPS = """\
Timestamp, DeviceId, utilization.compute (%), utilization.media (%), power.draw (W), power.draw.gpu (W), \
power.limit (W), power.max_limit (W), memory.total (MiB), memory.used (MiB), memory.free (MiB), temperature.memory (C)
09:10:12.000, 0, 12.5, 3, 91.50, 60.00, 150.00, 190.00, 16256, 256, 16000, 80
"""

DISCOVERY_BOX = """
+-----------+----------------------------------------------------------------+
| Device ID | Device Information                                             |
+-----------+----------------------------------------------------------------+
| 0         | Device Name: Intel(R) Arc(TM) B580 Graphics                    |
|           | Vendor Name: Intel(R) Corporation                              |
|           | SOC UUID: 00000000-0000-0006-0000-0000e20b8086                 |
|           | PCI BDF Address: 0000:4D:00.0                                  |
|           | DRM Device: /dev/dri/card2                                     |
|           |                                                                |
|           | Memory Physical Size: 12216.00 MiB                             |
|           | Max Mem Alloc Size: 4095.99 MiB                                |
+-----------+----------------------------------------------------------------+
| 1         | Device Name: Intel(R) Graphics [0x020a]                        |
|           | UUID: 00000000-0000-0000-0000-020a00008086                     |
+-----------+----------------------------------------------------------------+
"""

DUMP_TILES = """\
Timestamp,DeviceId,TileId,GPU Memory Used (MiB),GPU Core Temperature (Celsius Degree),\
Average % utilization of all GPU Engines,GPU Power (W),Compute Engine 0 (%)
11:00:00.100, 03, 0, 0999, 040, 010, 100,  99
11:00:00.100, 03, 1, 0999, 040, 010, 100,  99
11:00:01.100, 03, 0, 1000, 045, 020, 110.5,  99
11:00:01.100, 03, 1, 0500, 051, 060,     ,  99
"""

STATS_BOX = """
+-----------------------------+------------------------------------------------+
| Device ID                   | 2                                              |
+-----------------------------+------------------------------------------------+
| Average % utilization of    | 18                                             |
| all GPU Engines             |                                                |
| EU Array Active (%)         |                                                |
|                             |                                                |
| Compute Engine Util (%)     | 64; Engine 0: 64                               |
| Decoder Engine Util (%)     | Engine 0: 0, Engine 1: 3                       |
+-----------------------------+------------------------------------------------+
| Reset                       | 0                                              |
+-----------------------------+------------------------------------------------+
| GPU Power (W)               | 37                                             |
| GPU Frequency (MHz)         | 1850                                           |
| Media Engine Freq (MHz)     | 925                                            |
| GPU Core Temperature (C)    | 52                                             |
| GPU Memory Temperature (C)  | 70                                             |
| GPU Memory Used (MiB)       | 640                                            |
| GPU Memory Util (%)         | 4                                              |
+-----------------------------+------------------------------------------------+
"""

STATS_TILES = """
+------------------------------+-----------------------------------------------+
| Device ID                    | 1                                             |
+------------------------------+-----------------------------------------------+
| Energy Consumed (J)          | Tile 0: 900.05, Tile 1: 910.06                |
| GPU Utilization (%)          | Tile 0: N/A; Tile 1: N/A                      |
| Compute Engine Util (%)      | Tile 0:                                       |
|                              |   Engine 0: 83, Engine 1: 0                   |
|                              | Tile 1:                                       |
|                              |   Engine 0: 5, Engine 1: 0                    |
+------------------------------+-----------------------------------------------+
| GPU Power (W)                | Tile 0: avg: 80, min: 70, max: 95, current: 81 |
|                              | Tile 1: avg: 60, min: 50, max: 75, current: 64 |
+------------------------------+-----------------------------------------------+
| GPU Core Temperature         | Tile 0: avg: 36, min: 36, max: 36, current: 36 |
| (Celsius Degree)             | Tile 1: avg: 33, min: 33, max: 44, current: 43 |
+------------------------------+-----------------------------------------------+
"""

# Before 1.3.
PS_TABLE = """PID       Command             DeviceID       SHR            MEM
3010      python3             0              0              1048576
3010      python3             1              0              2048
777       my long command     0              12             4096
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

STATS_JSON = """{
    "device_id": 0,
    "device_level": [
        { "metrics_type": "XPUM_STATS_POWER", "avg": 40.1, "value": 44.75 },
        { "metrics_type": "XPUM_STATS_ENERGY", "value": 16169744 },
        { "metrics_type": "XPUM_STATS_MEMORY_USED", "value": 229.1875 }
    ],
    "tile_level": [
        { "tile_id": 0, "data_list": [
            { "metrics_type": "XPUM_STATS_GPU_UTILIZATION", "value": 30 },
            { "metrics_type": "XPUM_STATS_POWER", "value": 20.0 },
            { "metrics_type": "XPUM_STATS_GPU_CORE_TEMPERATURE", "value": 53.0 } ] },
        { "tile_id": 1, "data_list": [
            { "metrics_type": "XPUM_STATS_GPU_UTILIZATION", "avg": 50 },
            { "metrics_type": "XPUM_STATS_GPU_CORE_TEMPERATURE", "value": 49.0 } ] }
    ]
}
"""

PS_JSON = """{
    "device_util_by_proc_list": [
        { "device_id": 0, "mem_size": 1048576, "process_id": 3010, "process_name": "python3", "shared_mem_size": 0 },
        { "device_id": 0, "mem_size": 1966, "process_id": 5151, "process_name": "xpu-smi", "shared_mem_size": 0 }
    ]
}
"""

BOX = """
+----------------------------------------------+----------------------------+------------------------+
|            Intel XPU-SMI v2.0    Driver: 0123456789ABCDEF0123456    Level Zero: 1.27.0             |
+----------------------------------------------+----------------------------+------------------------+
| GPU  Name                    Persistence-M   | Bus-Id            Disp.A   |   Volatile Uncorr. ECC |
| Fan              Temp  Pwr:Usage/Cap         | Memory-Usage               |   GPU-Util  Compute M. |
+----------------------------------------------+----------------------------+------------------------+
|   0  Intel(R) Arc(TM) Pro B  Off             | 0000:23:00.0      Off      |               Disabled |
|      60 Graphics                             |                            |                        |
| 0%     31%       48C  43W / 200W             | 3642MiB / 24480MiB         |     35%        Default |
+----------------------------------------------+----------------------------+------------------------+
|   1  Intel(R) Arc(TM) A770   Off             | 0000:42:00.0      Off      |               Disabled |
|      Graphics                                |                            |                        |
| N/A               N/A  N/A                   | 25MiB / 16288MiB           |      N/A       Default |
+----------------------------------------------+----------------------------+------------------------+

+-------+----------+--------+----------------------------------------------------+--------------------+
| Processes:                                                                                          |
|   GPU        PID    Type    Process Name                                           GPU Memory Usage |
+-------+----------+--------+----------------------------------------------------+--------------------+
|     0       3010     C      my long name                                                   3300 MiB |
|     0       4100     G      firefox                                                        7692 MiB |
|     0       5151     C      xpu-smi                                                             N/A |
+-------+----------+--------+----------------------------------------------------+--------------------+
"""

SAMPLES: dict[str, list[str]] = {
    "intel_gpu_top": [TOP_OLD, TOP_NEW, TOP_ARC, TOP_NEW[:700]],
    "xpu-smi": [
        DUMP_NEW,
        DUMP_2,
        DUMP_2_GROUPS,
        DUMP_TILES,
        BOX,
        DISCOVERY_BOX,
        STATS_BOX,
        STATS_TILES,
        PS_TABLE,
        DISCOVERY_JSON,
        DISCOVERY_CSV,
        STATS_JSON,
        PS_JSON,
    ],
}
