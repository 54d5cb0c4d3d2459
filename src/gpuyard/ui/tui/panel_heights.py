"""How the height of a terminal is shared out. All pure."""

from msgspec import Struct

# The head, the line for what happens, the keys.
_ALWAYS = 3
_LEAST_QUEUE = 4
_WIDE = 160


class Heights(Struct, frozen=True, kw_only=True):
    """Lines for each panel, its heading included; 0 where there is none. `each` is how many a device has."""

    devices: int
    each: int
    queue: int
    log: int


def device_columns(width: int, devices: int) -> int:
    """Beside each other, where there is room and they are many."""
    return 2 if width >= _WIDE and devices > 2 else 1


def share_out(height: int, device_rows: int) -> Heights:
    """The queue is what people came for; in a low window the log goes first, then the devices."""
    left = max(0, height - _ALWAYS)
    most = max(2, left * 3 // 7)
    each = 2 if 2 * device_rows + 1 <= most else 1
    devices = min(max(1, each * device_rows) + 1, most) if left >= _LEAST_QUEUE + 2 else 0
    left -= devices
    log = left * 2 // 5 if left >= 2 * _LEAST_QUEUE else 0
    return Heights(devices=devices, each=each, queue=left - log, log=log)
