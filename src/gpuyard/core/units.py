"""Sizes as people write them. As GPU vendors do, 1 GB is 1,024 MB and 1 MB is 1,048,576 bytes."""

import re

from gpuyard.errors import UserError

_MB_PER_UNIT = {"B": 1 / 1048576, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1048576.0}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([KMGT])(?:i?B)?|(B))?\s*", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> float:
    """`8G`, `8GB`, `8GiB`, `8000MB` or a bare `8000` (MB) in MB."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UserError(f"'{text}' is not a size", hint="write it as 8G, 512MB or a number of MB")
    number, scaled, plain = match.groups()
    return float(number) * _MB_PER_UNIT[(scaled or plain or "M").upper()]


def format_size(megabytes: float) -> str:
    """MB below one GB, GB with one decimal above."""
    if megabytes < 1024:
        return f"{megabytes:.0f} MB"
    return f"{megabytes / 1024:.1f} GB"
