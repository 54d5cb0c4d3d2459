"""`amd-smi`, AMD's tool since ROCm 5.6: `list`, `static`, `metric`, `process` and `monitor`, in JSON, text and tables.

Rules:
- Every output becomes records of one shape, that of the JSON; a part that a release leaves out stays unknown.
- "MB" are of 1,048,576 bytes. Temperature is the edge sensor's or, where a card has none (MI300), the hotspot's.
- The power limit is the cap in force or, where that is not printed, the highest one that may be set. It is read with
  the name, once.
- A read costs two calls, `metric` and `process`. Ids and names are asked for once, and again when the numbers of the
  cards change: a card that falls off the bus renumbers those behind it.
"""

import re
import time
from typing import Any

from msgspec.structs import replace

from gpuyard.core.model import Device, Problem, Process, Reading, Vendor
from gpuyard.errors import ProbeCrashed, ProbeError, ProbeGarbled
from gpuyard.probes import figures
from gpuyard.probes.amd import cards
from gpuyard.probes.amd.printed import (
    cells,
    garbled,
    json_documents,
    parse_output,
    run_until,
    section,
    table_rows,
)

NAME = "amd-smi"
_TEXT_LINE = re.compile(r"([ \t]*)([^:\n]+):[ \t]*(.*)")
_MONITOR_COLUMNS = {
    "POWER": ("power", "socket_power"),
    "PWR_CAP": ("limit", "socket_power"),
    "GPU_TEMP": ("temperature", "hotspot"),
    "GPU_T": ("temperature", "hotspot"),
    "GFX_UTIL": ("usage", "gfx_activity"),
    "GFX%": ("usage", "gfx_activity"),
    "VRAM_USED": ("mem_usage", "used_vram"),
    "VRAM_TOTAL": ("mem_usage", "total_vram"),
}

type _Record = dict[str, Any]
