"""Small outputs in the formats of AMD's tools, made up for tests: tool name -> texts."""

from tests.unit.probes import samples_rocm

AMD_SMI_METRIC = """{
    "gpu_data": [
        {
            "gpu": 0,
            "usage": {"gfx_activity": {"value": 37, "unit": "%"}, "umc_activity": "N/A", "vcn_activity": ["N/A"]},
            "power": {"socket_power": {"value": 205, "unit": "W"}, "gfx_voltage": "N/A"},
            "temperature": {
                "edge": "N/A",
                "hotspot": {"value": 61, "unit": "C"},
                "mem": {"value": 48, "unit": "C"}
            },
            "mem_usage": {
                "total_vram": {"value": 65520, "unit": "MB"},
                "used_vram": {"value": 1024, "unit": "MB"},
                "free_vram": {"value": 64496, "unit": "MB"},
                "total_gtt": {"value": 128000, "unit": "MB"},
                "used_gtt": {"value": 77, "unit": "MB"}
            }
        },
        {
            "gpu": 1,
            "usage": "N/A",
            "power": {"socket_power": {"value": 65535, "unit": "W"}},
            "temperature": {"edge": {"value": 33, "unit": "C"}, "hotspot": {"value": 39, "unit": "C"}},
            "mem_usage": {"total_vram": {"value": 65520, "unit": "MB"}, "used_vram": "N/A", "free_vram": "N/A"}
        }
    ]
}
"""

AMD_SMI_METRIC_BARE = """[
    {
        "gpu": 0,
        "usage": {"gfx_activity": 12, "umc_activity": 3},
        "power": {"current_socket_power": "N/A", "average_socket_power": 44},
        "temperature": {"edge": 41, "hotspot": 44},
        "mem_usage": {"total_vram": 16368, "used_vram": 512}
    }
]
"""

AMD_SMI_LIST = """[
    {"gpu": 0, "bdf": "0000:05:00.0", "uuid": "a1ff740f-0000-1000-80b2-c3d4e5f60718", "kfd_id": 7, "partition_id": 0},
    {"gpu": 1, "bdf": "0000:26:00.0", "uuid": "00ff740f-0000-1000-8000-000000000000", "kfd_id": 8, "partition_id": 0}
]
"""

AMD_SMI_LIST_DPX = """[
    {"gpu": 0, "bdf": "0000:05:00.0", "uuid": "a1ff74a1-0000-1000-80b2-c3d4e5f60718", "node_id": 1, "partition_id": 0},
    {"gpu": 1, "bdf": "0000:05:00.1", "uuid": "a1ff74a1-0000-1000-80b2-c3d4e5f60718", "node_id": 2, "partition_id": 1}
]
"""

AMD_SMI_STATIC = """{
    "gpu_data": [
        {
            "gpu": 0,
            "asic": {"market_name": "Instinct Example", "vendor_id": "0x1002", "asic_serial": "0xA1B2C3D4E5F60718"},
            "bus": {"bdf": "0000:05:00.0", "max_pcie_width": 16},
            "limit": {
                "ppt0": {
                    "max_power_limit": {"value": 300, "unit": "W"},
                    "min_power_limit": {"value": 0, "unit": "W"},
                    "socket_power_limit": {"value": 250, "unit": "W"}
                },
                "ppt1": {"max_power_limit": "N/A", "min_power_limit": "N/A", "socket_power_limit": "N/A"}
            },
            "vram": {"type": "HBM2E", "size": {"value": 65520, "unit": "MB"}}
        },
        {
            "gpu": 1,
            "asic": {"market_name": "0x740f", "asic_serial": "0x0000000000000000"},
            "bus": {"bdf": "0000:26:00.0"},
            "limit": {"max_power": {"value": 300, "unit": "W"}, "current_power": {"value": 0, "unit": "W"}},
            "board": {"product_name": "Board Example"}
        }
    ]
}
"""

AMD_SMI_PROCESS = """[
    {
        "gpu": 0,
        "process_list": [
            {
                "process_info": {
                    "name": "/usr/bin/python3",
                    "pid": 4321,
                    "memory_usage": {
                        "gtt_mem": {"value": 9000000, "unit": "B"},
                        "cpu_mem": {"value": 0, "unit": "B"},
                        "vram_mem": {"value": 2147483648, "unit": "B"}
                    },
                    "mem_usage": {"value": 0, "unit": "B"}
                }
            }
        ]
    },
    {"gpu": 1, "process_list": [{"process_info": "No running processes detected"}]}
]
"""


RADEONTOP = (
    "Dumping to -, line limit 1.\n"
    "1700000000.123456: bus 0a, gpu 12.50%, ee 0.00%, vgt 1.67%, spi 0.83%, vram 25.00% 2048.00mb, gtt 1.10% 88.00mb, "
    "mclk 100.00% 1.800ghz, sclk 26.65% 0.533ghz\n"
)
RADEONTOP_OLD = "1502903295.84311: gpu 0.00%, ee 0.00%, vgt 0.00%, cb 0.00%, vram 0.20% 20.00mb\n"
RADEONTOP_NO_VRAM = (
    "Failed to open DRM node, no VRAM support.\n"
    "Dumping to -, line limit 1.\n"
    "1700000000.5: bus c3, gpu 99.17%, ee 0.00%, vgt 0.00%, mclk 10.00% 0.100ghz, sclk 20.00% 0.400ghz\n"
)

SAMPLES: dict[str, list[str]] = {
    "amd-smi": [AMD_SMI_METRIC, AMD_SMI_METRIC_BARE, AMD_SMI_LIST, AMD_SMI_LIST_DPX, AMD_SMI_STATIC, AMD_SMI_PROCESS],
    "rocm-smi": samples_rocm.SAMPLES,
    "radeontop": [RADEONTOP, RADEONTOP_OLD, RADEONTOP_NO_VRAM],
}
