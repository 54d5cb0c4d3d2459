"""Small outputs of the Apple tools, written for the tests in the formats of several releases."""

_HEAD = (
    '<?xml version="1.0" encoding="UTF-8"?>\n'
    '<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">\n'
    '<plist version="1.0">\n<dict>\n'
)
_TAIL = "</dict>\n</plist>\n"


def plist(body: str) -> str:
    return f"{_HEAD}{body}\n{_TAIL}"


_ENERGY_ONLY = plist(
    "<key>is_delta</key><true/>\n"
    "<key>elapsed_ns</key><integer>200000000</integer>\n"
    "<key>hw_model</key><string>Mac15,3</string>\n"
    "<key>timestamp</key><date>2025-02-03T04:05:06Z</date>\n"
    "<key>gpu</key>\n<dict>\n"
    "<key>freq_hz</key><real>512.5</real>\n"
    "<key>idle_ns</key><integer>150000000</integer>\n"
    "<key>idle_ratio</key><real>0.75</real>\n"
    "<key>dvfm_states</key>\n<array>\n<dict>\n<key>freq</key><integer>444</integer>\n"
    "<key>used_ns</key><integer>50000000</integer>\n<key>used_ratio</key><real>0.25</real>\n</dict>\n</array>\n"
    "<key>gpu_energy</key><integer>600</integer>\n"
    "</dict>"
)
_WITH_PROCESSOR = plist(
    "<key>elapsed_ns</key><integer>1000000000</integer>\n"
    "<key>hw_model</key><string>MacBookPro18,4</string>\n"
    "<key>processor</key>\n<dict>\n<key>cpu_power</key><real>812.25</real>\n<key>gpu_energy</key><integer>4321</integer>\n"
    "<key>gpu_power</key><real>4250.5</real>\n</dict>\n"
    "<key>tasks</key>\n<array>\n<dict>\n<key>name</key><string>caf\ufffd</string>\n</dict>\n</array>\n"
    "<key>gpu</key>\n<dict>\n<key>idle_ratio</key><real>0.125</real>\n</dict>"
)

_M_SERIES = (
    "+-o AGXAcceleratorG15X  <class AGXAcceleratorG15X, id 0x10000047b, registered, matched, active, busy 0 (2 ms),"
    " retain 88>\n    {\n"
    '      "IOClass" = "AGXAcceleratorG15X"\n      "gpu-core-count" = 18\n'
    '      "IOCompatibilityProperties" = {"IOName"="IOAccel","PerformanceStatistics"={"vramFreeBytes"=15728640}}\n'
    '      "PerformanceStatistics" = {"In use system memory (driver)"=4096000,"Alloc system memory"=9663676416,'
    '"Tiler Utilization %"=11,"recoveryCount"=0,"Renderer Utilization %"=40,"Device Utilization %"=42,'
    '"SplitSceneCount"=0,"In use system memory"=1610612736}\n'
    '      "model" = "Apple M3 Pro"\n    }\n\n'
)
_IN_A_TREE = (
    '  | |   "PerformanceStatistics" = {"Device Utilization %"=7,"In use system memory (driver)"=1048576,'
    '"In use system memory"=536870912}\n'
    '  | |   "model" = "Apple M1"\n'
)

SAMPLES: dict[str, list[str]] = {
    "powermetrics": [
        _ENERGY_ONLY,
        _WITH_PROCESSOR,
        f"{_ENERGY_ONLY}\0{_WITH_PROCESSOR}",
        f"\0{_WITH_PROCESSOR}\0{_ENERGY_ONLY}\0{_WITH_PROCESSOR[:500]}",
    ],
    "ioreg": [_M_SERIES, _IN_A_TREE],
}
