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


SAMPLES = [ROCM_SMI_JSON, ROCM_SMI_JSON_TWO_DIES, ROCM_SMI_JSON_OLD]
