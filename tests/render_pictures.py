"""Pictures of the example, decoded independently of the code that wrote them."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Picture = npt.NDArray[Any]

EXAMPLE = Path(__file__).parents[1] / "examples/render"
SCENES = ("dunes", "gallery", "hills", "rings", "temple", "town")
ACTORS = ("bouncer", "butterfly", "empty", "spinner", "walker")
LABELS = [f"{scene}-{actor}-{shot}" for scene in SCENES for actor in ACTORS for shot in (1, 2)]


def pictures(folder: Path) -> dict[str, Picture]:
    return {path.parent.name: decoded(path.read_bytes()) for path in folder.glob("*/image.png")}


def decoded(data: bytes) -> Picture:
    """Decode a PNG of 8 bits per channel with rows that use filter 0 (none) or 2 (up)."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks = list(_chunks(data[8:]))
    (first, header), (last, end) = chunks[0], chunks[-1]
    assert (first, last, end) == (b"IHDR", b"IEND", b"")
    width, height, *form = struct.unpack(">IIBBBBB", header)
    assert form == [8, 2, 0, 0, 0]
    packed = zlib.decompress(b"".join(content for kind, content in chunks if kind == b"IDAT"))
    rows = np.frombuffer(packed, np.uint8).reshape(height, 1 + 3 * width)
    pixels = np.zeros((height, 3 * width), np.uint8)
    for number, (filtering, row) in enumerate(zip(rows[:, 0], rows[:, 1:], strict=True)):
        assert filtering in (0, 2)
        pixels[number] = row + (pixels[number - 1] if number and filtering else 0)
    return pixels.reshape(height, width, 3)


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    while data:
        length, kind = struct.unpack(">I4s", data[:8])
        (checksum,) = struct.unpack(">I", data[8 + length : 12 + length])
        assert checksum == zlib.crc32(data[4 : 8 + length])
        yield kind, data[8 : 8 + length]
        data = data[12 + length :]
