"""Whether a queue is plainly this machine's own, without the import of msgspec, which takes longer than all else that a
command does before it starts the daemon. `queue_host` decides in all other cases."""

import os

from gpuyard.connect.fast_json import decode
from gpuyard.system.machine_identity import boot_id, machine_id
from gpuyard.system.private_files import PrivateFileError, open_own

_LONGEST = 4096


def is_plainly_ours(folder: str) -> bool:
    """Return whether `queue.host` was written on this machine since it was started."""
    try:
        with open(open_own(f"{folder}/queue.host", os.O_RDONLY), "rb") as file:
            found = decode(file.read(_LONGEST).decode("utf-8", "replace"))
    except (OSError, PrivateFileError, ValueError):
        return False
    boot = boot_id()
    is_same_start = isinstance(found, dict) and boot is not None and found.get("boot_id") == boot
    return is_same_start and found.get("machine_id") == machine_id()
