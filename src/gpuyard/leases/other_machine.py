"""Recognises the leases and tickets of another machine, where two machines see one lease directory.

They are about other devices, so they do not count here. Whether they are held cannot be known here: locks may be local
to a machine. So they are never removed here either.
"""

import msgspec
from msgspec import Struct

from gpuyard.core.lease import Holder
from gpuyard.system.machine_identity import boot_id, machine_name


class _AnyRecord(Struct, frozen=True):
    holder: Holder


def is_elsewhere(content: bytes) -> bool:
    """Return whether a record names a holder on another machine. False for what is not a record."""
    boot = boot_id()
    if boot is None or boot.encode() in content:
        return False
    try:
        holder = msgspec.json.decode(content, type=_AnyRecord).holder
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return holder.boot_id not in (None, boot) and holder.machine not in (None, machine_name())
