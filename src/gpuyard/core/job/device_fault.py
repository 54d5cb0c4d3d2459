"""Decide whether a failed program failed because of its GPU, from the end of its output.

The errors below are those for which the driver or the hardware is to blame: the GPU is gone, broken or cannot be used.
An illegal memory access or a failed launch is mostly a mistake of the program, and does not count.
"""

import re

from gpuyard.core.printable_text import printable

_FAULT_LINES = 200
_FAULT_CHARS = 1 << 17
_SAYS_CHARS = 200
_FAULTS = re.compile(
    r"uncorrectable (?:ECC|NVLink) error|CUDA_ERROR_(?:ECC|NVLINK)_UNCORRECTABLE"
    r"|(?:CUDA|ROCm)-capable devices? (?:is|are) (?:detected|busy or unavailable)"
    r"|CUDA_ERROR_(?:NO_DEVICE|DEVICE_UNAVAILABLE|SYSTEM_NOT_READY)|hipError(?:NoDevice|ECCNotCorrectable)"
    r"|cudaError(?:NoDevice|DevicesUnavailable|ECCUncorrectable|NvlinkUncorrectable|SystemNotReady)"
    r"|\bGPU (?:is lost|has fallen off the bus)|HW Exception by GPU node",
    re.IGNORECASE,
)


def find_device_fault(output: str) -> str | None:
    """Return the last line that reports a fault of a GPU, or None."""
    lines = output[-_FAULT_CHARS:].splitlines()[-_FAULT_LINES:]
    found = next((line for line in reversed(lines) if _FAULTS.search(line)), None)
    return None if found is None else printable(found.strip(), _SAYS_CHARS)
