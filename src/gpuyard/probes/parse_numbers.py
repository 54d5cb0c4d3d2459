"""Parse numbers as vendors' tools print them: with and without units, in brackets, as sentinels, as JSON objects.

Each function takes any value from the output and returns a plain number, or None if it holds none. None of them raises.
"""

import math
import re
import sys
from collections.abc import Mapping
from typing import Any

_FIGURE = re.compile(r"\s*([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?)\s*([%°A-Za-z/]*)\s*", re.ASCII)
_MB_PER_UNIT = {
    **dict.fromkeys(("b", "bytes"), 1 / 1048576),
    **dict.fromkeys(("kb", "kib"), 1 / 1024),
    **dict.fromkeys(("mb", "mib"), 1.0),
    **dict.fromkeys(("gb", "gib"), 1024.0),
}
_NO_NAMES = frozenset(
    {"", "-", "insufficient permissions", "n/a", "na", "none", "not found", "not supported", "unknown", "unknown error"}
)
# Registers that read all ones mean "not available": 16 and 32 bits wide in AMD's metrics tables, 64 in NVML.
_SENTINELS = frozenset({65535.0, 4294967295.0, 18446744073709551615.0})


def quantity(raw: Any) -> tuple[float, str] | None:
    """Return number and unit of `raw`: text, a number, or an object such as `{"value": 91, "unit": "%"}`."""
    if isinstance(raw, dict):
        value, unit = raw.get("value"), raw.get("unit")
        inner = None if isinstance(value, dict) else quantity(value)
        return (inner[0], unit if isinstance(unit, str) else inner[1]) if inner else None
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        return None
    if isinstance(raw, str):
        match = _FIGURE.fullmatch(raw)
        if match is None:
            return None
        value, unit = float(match[1]), match[2]
    else:
        value, unit = float(raw) if abs(raw) <= sys.float_info.max else math.inf, ""
    return (value, unit) if math.isfinite(value) and value not in _SENTINELS else None


def number(raw: Any) -> float | None:
    found = quantity(raw)
    return found[0] if found else None


def whole(raw: Any, below: int = 2**53) -> int | None:
    """Return a non-negative integer, or None."""
    value = number(raw)
    return int(value) if value is not None and 0 <= value < below and value == int(value) else None


def device_index(raw: Any) -> int | None:
    return whole(raw, below=2**16)


def process_id(raw: Any) -> int | None:
    return whole(raw, below=2**31) or None


def megabytes(raw: Any, unit: str = "MiB") -> float | None:
    """Return memory in MB. `unit` is the unit of a bare number."""
    return _scaled(raw, unit, _MB_PER_UNIT, 2)


def watts(raw: Any, unit: str = "W") -> float | None:
    return _scaled(raw, unit, {"w": 1.0, "mw": 1e-3, "uw": 1e-6}, 4)


def _scaled(raw: Any, unit: str, scales: Mapping[str, float], digits: int) -> float | None:
    found = quantity(raw)
    scale = found and scales.get((found[1] or unit).lower())
    if not found or not scale:
        return None
    value = found[0] * scale
    return round(value, digits) if 0 <= value < math.inf else None


def percent(raw: Any) -> float | None:
    """Return a percentage from 0 to 100; sampling noise beyond 100 counts as 100."""
    value = number(raw)
    return round(min(value, 100.0), 2) if value is not None and 0 <= value <= 1000 else None


def celsius(raw: Any) -> float | None:
    value = number(raw)
    return value if value is not None and -100 <= value <= 300 else None


def words(raw: Any) -> str | None:
    """Return a name, or None for an empty one and for placeholders such as "N/A"."""
    text = " ".join(raw.split()) if isinstance(raw, str) else ""
    return None if text.strip("[]").lower() in _NO_NAMES else text
