"""The heights of the panels. All pure."""

from msgspec import Struct

# The header, the notice line, the keys.
_ALWAYS = 3
_LEAST_QUEUE = 4
_WIDE = 160


class Heights(Struct, frozen=True, kw_only=True):
    """Lines of each panel with its heading; 0 hides it. `each` is the number of lines per device."""

    devices: int
    each: int
    queue: int
    log: int


def device_columns(width: int, devices: int) -> int:
    """Return 2 on wide terminals with more than two devices, else 1."""
    return 2 if width >= _WIDE and devices > 2 else 1


def share_out(height: int, device_rows: int) -> Heights:
    """Share the height. The queue matters most: a low window drops the log first, then the devices."""
    left = max(0, height - _ALWAYS)
    most = max(2, left * 3 // 7)
    each = 2 if 2 * device_rows + 1 <= most else 1
    devices = min(max(1, each * device_rows) + 1, most) if left >= _LEAST_QUEUE + 2 else 0
    left -= devices
    log = left * 2 // 5 if left >= 2 * _LEAST_QUEUE else 0
    return Heights(devices=devices, each=each, queue=left - log, log=log)
