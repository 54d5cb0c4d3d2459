"""Parse and format sizes and durations. As with GPU vendors, 1 GB is 1,024 MB and 1 MB is 1,048,576 bytes."""

import re

from gpuyard.errors import UserError

_MB_PER_UNIT = {"B": 1 / 1048576, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1048576.0}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([KMGT])(?:i?B)?|(B))?\s*", re.IGNORECASE | re.ASCII)

_SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d{1,12}(?:\.\d*)?|\.\d+)\s*(ms|s|m|h|d)?\s*", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> float:
    """Return the MB of `8G`, `8GB`, `8GiB`, `8000MB` or a bare `8000` (MB)."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UserError(f"'{text}' is not a size", hint="write it as 8G, 512MB or a number of MB")
    number, scaled, plain = match.groups()
    return float(number) * _MB_PER_UNIT[(scaled or plain or "M").upper()]


def parse_duration(text: str) -> float:
    """Return the seconds of `30s`, `200ms`, `4h`, `2d` or a bare number of seconds."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise UserError(f"'{text}' is not a time", hint="write it as 30s, 10m, 4h or a number of seconds")
    return float(match[1]) * _SECONDS_PER_UNIT[(match[2] or "s").lower()]


def format_size(megabytes: float) -> str:
    """Return MB below one GB, and GB with one decimal from there on."""
    if megabytes < 1024:
        return f"{megabytes:.0f} MB"
    return f"{megabytes / 1024:.1f} GB"


def format_duration(seconds: float) -> str:
    """Return the two largest units: `45s`, `3m 20s`, `4h 5m`, `2d 3h`."""
    whole = int(seconds)
    for unit, below, size in (("d", "h", 86400), ("h", "m", 3600), ("m", "s", 60)):
        if whole >= size:
            rest = int(whole % size / _SECONDS_PER_UNIT[below])
            return f"{whole // size}{unit} {rest}{below}" if rest else f"{whole // size}{unit}"
    return f"{whole}s"
