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

AMD_SMI_MONITOR = """GPU  XCP  POWER  PWR_CAP   GPU_T   MEM_T   GFX_CLK   GFX%   MEM%   ENC%      VRAM_USAGE
  0    0   32 W    300 W   58 °C   58 °C  1115 MHz    6 %    1 %    N/A    2.5/ 16.0 GB
  1    0    N/A      N/A     N/A     N/A       N/A    N/A    N/A    N/A    0.5/ 16.0 GB
"""

AMD_SMI_MONITOR_OLD = """\
GPU  POWER  GPU_TEMP  MEM_TEMP  GFX_UTIL  GFX_CLOCK     THROTTLE  VRAM_USED  VRAM_TOTAL   PCIE_BW

  0   11 W     43 °C     58 °C      84 %   1814 MHz  UNTHROTTLED     227 MB    25476 MB  N/A Mb/s
"""

AMD_SMI_MONITOR_PROCESS = """\
WARNING: User is missing the following required groups: render, video. Please add user to these groups.
GPU  POWER   GPU_T   MEM_T   GFX_CLK   GFX%   MEM%   ENC%   DEC%      VRAM_USAGE
  0  293 W   49 °C   43 °C  2106 MHz   96 %    0 %    N/A    0 %    4.0/192.0 GB

PROCESS INFO:
GPU                  NAME      PID   GTT_MEM   CPU_MEM  VRAM_MEM  MEM_USAGE     GFX     ENC
  0                   N/A     7127     0.0 B     0.0 B    2.0 GB      0.0 B    0 ns    0 ns
"""

AMD_SMI_MONITOR_PROCESS_NEW = """\
GPU  XCP  POWER  PWR_CAP   GPU_T   MEM_T   GFX_CLK   GFX%   MEM%      VRAM_USAGE
  0    0  280 W    327 W   93 °C   58 °C  1115 MHz   97 %    1 %    2.5/ 16.0 GB
  1    0   11 W    327 W   31 °C   30 °C    41 MHz    0 %    0 %    0.1/ 16.0 GB
  2    0   11 W    327 W   31 °C   30 °C    41 MHz    0 %    0 %    0.1/ 16.0 GB

PROCESS INFO:
GPU               NAME      PID   GTT_MEM   CPU_MEM  VRAM_MEM   MEM_USG      CU%    SDMA   EVICT
  0        my long name B    15222   19.6 MB     0.0 B    1.5 GB    1.6 GB    0.0 %     0 us    0 ms
  0                     B    15223    2.0 MB     0.0 B  512.0 MB  514.0 MB      N/A     0 us    0 ms
  1                   N/A      N/A       N/A       N/A       N/A       N/A      N/A     N/A     N/A
"""

AMD_SMI_MONITOR_PROCESS_WATCHED = """\
TIMESTAMP  GPU  POWER
1700000001   0   10 W

PROCESS INFO:
 TIMESTAMP  GPU                  NAME      PID   GTT_MEM   CPU_MEM  VRAM_MEM  MEM_USAGE     GFX     ENC
1700000001    0                     a       11     0.0 B     0.0 B    2.0 MB      0.0 B    0 ns    0 ns
1700000001    0                     b       12     0.0 B     0.0 B    2.0 MB      0.0 B    0 ns    0 ns
1700000002    0                     b       12     0.0 B     0.0 B    3.0 MB      0.0 B    0 ns    0 ns
"""

AMD_SMI_MONITOR_WATCHED = """\
TIMESTAMP  GPU  XCP  POWER   GPU_T  GFX%
1700000001   0    0   10 W   40 °C   1 %
1700000001   0    1    N/A     N/A   N/A
1700000002   0    0   20 W   41 °C   2 %
1700000002   0    1    N/A     N/A   N/A
"""

AMD_SMI_MONITOR_JSON = """[
    {
        "gpu": 0, "xcp": 0,
        "power_usage": {"value": 142, "unit": "W"}, "max_power": {"value": 750, "unit": "W"},
        "hotspot_temperature": {"value": 44, "unit": "C"}, "memory_temperature": {"value": 36, "unit": "C"},
        "gfx_clk": {"value": 132, "unit": "MHz"}, "gfx": {"value": 12, "unit": "%"}, "mem": {"value": 3, "unit": "%"},
        "vram_used": {"value": 285, "unit": "MB"}, "vram_free": {"value": 196307, "unit": "MB"},
        "vram_total": {"value": 196592, "unit": "MB"}, "vram_percent": {"value": 0.14, "unit": "%"}
    },
    {"gpu": 0, "xcp": 1, "power_usage": "N/A", "hotspot_temperature": "N/A", "gfx": {"value": "N/A", "unit": "%"}},
    {
        "gpu": 1, "xcp": 0, "power_usage": "N/A", "hotspot_temperature": "N/A", "gfx": {"value": "N/A", "unit": "%"},
        "vram_used": {"value": 0.5, "unit": "GB"}, "vram_total": {"value": 16.0, "unit": "GB"},
        "process_list": [{"process_info": {"name": "train", "pid": 31, "mem_usage": {"value": 1048576, "unit": "B"}}}]
    }
]
"""

AMD_SMI_MONITOR_CSV = """\
gpu,power_usage,hotspot_temperature,memory_temperature,gfx_clk,gfx,mem,encoder,decoder,vram_used,vram_total
0,142,44,36,132,12,3,N/A,0,0.5,16.0
1,N/A,N/A,N/A,N/A,N/A,N/A,N/A,N/A,N/A,N/A

gpu,name,pid,gtt_mem,cpu_mem,vram_mem,mem_usage,gfx,enc,cu,sdma
0,python3,77,0,0,1048576,0,0,0,0,0
"""

AMD_SMI_MONITOR_CSV_WATCHED = """\
timestamp,gpu,xcp,power_usage,max_power,vram_used,vram_free,vram_total,vram_percent
1700000001,0,0,100,300,100,16268,16368,0.6
1700000001,0,1,N/A,300,100,16268,16368,0.6
1700000002,0,0,120,300,200,16168,16368,1.2
1700000002,0,1,N/A,300,200,16168,16368,1.2
"""

AMD_SMI_BOX = """\
+------------------------------------------------------------------------------+
| AMD-SMI 26.1.0+0000000       amdgpu version: 6.10.0   ROCm version: 7.1.0    |
| VBIOS version: 00000000                                                      |
| Platform: Linux Baremetal                                                    |
|-------------------------------------+----------------------------------------|
| BDF                        GPU-Name | Mem-Uti   Temp   UEC       Power-Usage |
| GPU  HIP-ID  OAM-ID  Partition-Mode | GFX-Uti    Fan               Mem-Usage |
|=====================================+========================================|
| 0000:2F:00.0 ...Example Card X1 OAM | 29 %     93 °C   0           280/327 W |
|   0       0       3        SPX/NPS1 | 97 %    51.76             512/16368 MB |
|-------------------------------------+----------------------------------------|
| 0000:c6:00.0                 0x1586 | N/A        N/A   0             N/A/0 W |
|   1       1     N/A             N/A | N/A        N/A                     N/A |
+-------------------------------------+----------------------------------------+
+------------------------------------------------------------------------------+
| Processes:                                                                   |
|  GPU        PID  Process Name          GTT_MEM  VRAM_MEM  MEM_USAGE     CU % |
|==============================================================================|
|    0      15222  my long name          19.6 MB    1.5 GB     1.6 GB  N/A     |
|    0      15223  N/A                     0.0 B     0.0 B      0.0 B  0.0 %   |
+------------------------------------------------------------------------------+
"""

AMD_SMI_TEXT = """CPU: 0
    SMU:
        FW_VERSION: 85.90.0

GPU: 0
    USAGE:
        GFX_ACTIVITY: 55 %
        VCN_ACTIVITY: [0 %, N/A]
    POWER:
        SOCKET_POWER: 120 W
        GFX_VOLTAGE: N/A mV
    TEMPERATURE:
        EDGE: N/A
        HOTSPOT: 47 °C
    MEM_USAGE:
        TOTAL_VRAM: 65520 MB
        USED_VRAM: 8 MB

GPU: 1
    PROCESS_INFO:
        NAME: train
        PID: 77
        MEMORY_USAGE:
            GTT_MEM: 2.0 MB
            VRAM_MEM: 1.5 GB
        MEM_USAGE: 0.0 B
    PROCESS_INFO:
        NAME: other
        PID: 78
        MEMORY_USAGE:
            VRAM_MEM: 3.0 MB
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
    "amd-smi": [
        AMD_SMI_METRIC,
        AMD_SMI_METRIC_BARE,
        AMD_SMI_LIST,
        AMD_SMI_LIST_DPX,
        AMD_SMI_STATIC,
        AMD_SMI_PROCESS,
        AMD_SMI_MONITOR,
        AMD_SMI_MONITOR_OLD,
        AMD_SMI_MONITOR_PROCESS,
        AMD_SMI_MONITOR_PROCESS_NEW,
        AMD_SMI_MONITOR_PROCESS_WATCHED,
        AMD_SMI_MONITOR_WATCHED,
        AMD_SMI_MONITOR_JSON,
        AMD_SMI_MONITOR_CSV,
        AMD_SMI_MONITOR_CSV_WATCHED,
        AMD_SMI_BOX,
        AMD_SMI_TEXT,
    ],
    "rocm-smi": samples_rocm.SAMPLES,
    "radeontop": [RADEONTOP, RADEONTOP_OLD, RADEONTOP_NO_VRAM],
}
