"""Small outputs in the formats of `rocm-smi`, made up for tests."""

ROCM_SMI_JSON = """WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status

{"card0": {"Device Name": "Navi 00 [Example]", "Device ID": "0x73bf", "Unique ID": "0x1a2b3c4d5e6f708",
"Temperature (Sensor edge) (C)": "40.0", "Temperature (Sensor junction) (C)": "44.0",
"Current Socket Graphics Package Power (W)": "31.5", "Max Graphics Package Power (W)": "264.0",
"GPU use (%)": "7", "PCI Bus": "0000:0B:00.0", "VRAM Total Memory (B)": "17163091968",
"VRAM Total Used Memory (B)": "1048576", "VIS_VRAM Total Memory (B)": "268435456",
"Card Series": "0x73bf", "Card Model": "0x73bf"},
"system": {"Driver version": "6.7.0", "PID4242": "python3, 1, 536870912, 0, unknown"}}
"""

ROCM_SMI_JSON_TWO_DIES = """{
    "card1": {
        "GPU ID": "0x740c", "Unique ID": "0x8c16deafdeadbeef", "PCI Bus": "0000:2F:00.0", "GPU use (%)": "2",
        "Temperature (Sensor junction) (C)": "51.0", "Average Graphics Package Power (W)": "N/A (Secondary die)"
    },
    "card0": {
        "GPU ID": "0x740c", "Unique ID": "0x8c16deafdeadbeef", "PCI Bus": "0000:2C:00.0", "GPU use (%)": "1",
        "Temperature (Sensor edge) (C)": "N/A", "Average Graphics Package Power (W)": "90.0"
    },
    "system": {"Driver version": "6.2.4", "PID11": "a, b, 2, 1048576, 0, 0"}
}
"""

ROCM_SMI_JSON_OLD = """{"card0": {"GPU ID": "0x66a0", "Temperature (Sensor #1) (c)": "27.0",
"Average Graphics Package Power": "155.0 W", "Max Graphics Package Power": "225.0W", "GPU use (%)": "3"}}
"""

ROCM_SMI_CSV = """WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status

device,Temperature (Sensor edge) (C),Current Socket Graphics Package Power (W),GPU use (%),PCI Bus
card0,54.0,20.358,2,0000:C6:00.0

device,VRAM Total Memory (B),VRAM Total Used Memory (B),Card Series,Card Vendor
card0,536870912,268435456,AMD Radeon Example,Advanced Micro Devices Inc. [AMD/ATI]

"PID4242","python3, 1, 1048576, 0, unknown"
"""

ROCM_SMI_LINES = """

============================ ROCm System Management Interface ============================
================================ Version of System Component =============================
Driver version: 6.8.5
==========================================================================================
=========================================== ID ===========================================
GPU[0]\t\t: Device Name: \t\tNavi 00 [Example]
GPU[0]\t\t: Device ID: \t\t0x73bf
GPU[1]\t\t: Device Name: \t\t0x740c
======================================= Unique ID ========================================
GPU[0]\t\t: Unique ID: 0x1a2b3c4d5e6f708
GPU[1]\t\t: Unique ID: N/A
====================================== Temperature =======================================
GPU[0]\t\t: Temperature (Sensor edge) (C): 40.0
GPU[0]\t\t: Temperature (Sensor junction) (C): 44.0
GPU[1]\t\t: Temperature (Sensor junction) (C): 51.0
==========================================================================================
GPU[0]\t\t: fclk clock level: 1: (1085Mhz)
GPU[0]\t\t: get_power_profiles, Not supported on the given system
======================================= Power Cap ========================================
GPU[0]\t\t: Max Graphics Package Power (W): 264.0
GPU[1]\t\t: Max Graphics Package Power (W): 560.0
=================================== Power Consumption ====================================
GPU[0]\t\t: Current Socket Graphics Package Power (W): 31.5
GPU[1]\t\t: Average Graphics Package Power (W): N/A (Secondary die)
=================================== % time GPU is busy ===================================
GPU[0]\t\t: GPU use (%): 7
GPU[1]\t\t: GPU use (%): 0
======================================= PCI Bus ID =======================================
GPU[0]\t\t: PCI Bus: 0000:0B:00.0
GPU[1]\t\t: PCI Bus: 0000:2F:00.0
================================== Memory Usage (Bytes) ==================================
GPU[0]\t\t: VRAM Total Memory (B): 17163091968
GPU[0]\t\t: VRAM Total Used Memory (B): 1048576
====================================== Product Info ======================================
GPU[1]\t\t: Card Series: \t\tExample Accelerator
===================================== KFD Processes ======================================
No KFD PIDs currently running
==========================================================================================
================================== End of ROCm SMI Log ===================================
"""

ROCM_SMI_LINES_PROCESSES = """\
GPU[0]\t\t: GPU use (%): 99
===================================== KFD Processes ======================================
KFD process information:
PID    \tPROCESS NAME   \tGPU(s)\tVRAM USED  \tSDMA USED\tCU OCCUPANCY\t
3722222\tidle           \t0     \t0          \t0        \t0           \t
1168514\tmy main thread \t1     \t1073741824 \t0        \tUNKNOWN     \t
==========================================================================================
2222222\tnot a process  \t1     \t1073741824 \t0        \t0
"""

ROCM_SMI_TABLE = """

=========================================== ROCm System Management Interface ===========================================
===================================================== Concise Info =====================================================
Device  Node  IDs              Temp    Power  Partitions          SCLK     MCLK     Fan     Perf  PwrCap  VRAM%  GPU%
              (DID,     GUID)  (Edge)  (Avg)  (Mem, Compute, ID)
========================================================================================================================
0       1     0x7550,   45211  54.0°C  41.0W  N/A, N/A, 0         1626Mhz  1124Mhz  0%      high  330.0W  6%     33%
1       2     0x7551,   43088  45.0°C  N/A    NPS1, SPX, 0        41Mhz    1124Mhz  24.71%  high  300.0W  61%    3%
========================================================================================================================
================================================= End of ROCm SMI Log ==================================================
"""

ROCM_SMI_TABLE_NAMED = """\
Device  [Model : Revision]    Temp        Power     Partitions      SCLK    MCLK    Fan  PwrCap  GPU%
        Name (20 chars)       (Junction)  (Socket)  (Mem, Compute)
==================================================================================================
0       [0x74a1 : 0x00]       35.0°C      133.0W    NPS1, SPX       131Mhz  900Mhz  0%   750.0W  100%
        AMD Example Card
==================================================================================================
"""

ROCM_SMI_TABLE_OLD = """========================ROCm System Management Interface========================
GPU  Temp   AvgPwr  SCLK    MCLK    Fan     Perf  PwrCap  VRAM%  GPU%
0    31.0c  18.0W   852Mhz  167Mhz  13.73%  auto  220.0W    7%   99%
==============================End of ROCm SMI Log ==============================
"""

ROCM_SMI_TABLE_DIE_EDGE = """\
========================= ROCm System Management Interface =========================
=================================== Concise Info ===================================
GPU  Temp (DieEdge)  AvgPwr  SCLK    MCLK     Fan  Perf  PwrCap  VRAM%  GPU%
0    47.0c           88.0W   900Mhz  1500Mhz  0%   auto  450.0W    3%   64%
1    29.0c           N/A     900Mhz  1500Mhz  0%   auto  0.0W      0%   0%
====================================================================================
"""

SAMPLES = [
    ROCM_SMI_JSON,
    ROCM_SMI_JSON_TWO_DIES,
    ROCM_SMI_JSON_OLD,
    ROCM_SMI_CSV,
    ROCM_SMI_LINES,
    ROCM_SMI_LINES_PROCESSES,
    ROCM_SMI_TABLE,
    ROCM_SMI_TABLE_NAMED,
    ROCM_SMI_TABLE_OLD,
    ROCM_SMI_TABLE_DIE_EDGE,
]
