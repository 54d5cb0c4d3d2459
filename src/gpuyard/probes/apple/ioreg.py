"""Parse the output of `ioreg -r -d 1 -w 0 -c IOAccelerator`: a tree of accelerators with statistics.

The tool needs no root, and reports used memory but not power on Apple silicon. Rules:
- `In use system memory` is the memory in use. The same words with `(driver)` behind them, and `Alloc system memory`,
  which counts reserved memory, are other figures.
- Unified memory has no size here; a card in an Intel Mac reports its own used and free memory.
- Only a node's own statistics count: nodes also carry running totals and templates that look like them.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from gpuyard.core.snapshot import Device, Reading, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.common import parse_numbers

IOREG = "ioreg"
IOREG_COMMAND = (IOREG, "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")

_NODE = re.compile(r"[\s|]*\+-o\s.*<class\s+([^,>]+)")
_PROPERTY = re.compile(r'[\s|]*"([^"]+)"\s*=\s*(.*)')
_TEXT = re.compile(r'<?"([^"]*)"')
# A number must be followed by something: the last number of a truncated output may lack digits.
_TOKEN = re.compile(r'"([^"]*)"\s*=\s*(?:([-+.\w]+)(?=\s*[,}]))?|"[^"]*"|[{(]|[)}]')


class _IoregNode(Struct, kw_only=True):
    """One node of the tree; unnamed if the output starts in the middle of it."""

    class_name: str | None = None
    model: str | None = None
    statistics: dict[str, str] | None = None


def parse_ioreg(text: str) -> Reading:
    found = [node for node in _nodes(text) if node.statistics is not None or "Accelerator" in (node.class_name or "")]
    if not found:
        raise ProbeGarbled(IOREG, "its output lists no accelerator")
    return Reading(devices=tuple(_device(index, node) for index, node in enumerate(found)))


def _nodes(text: str) -> Iterator[_IoregNode]:
    node = _IoregNode()
    for line in text.splitlines():
        header = _NODE.match(line)
        if header:
            yield node
            node = _IoregNode(class_name=parse_numbers.words(header[1]))
            continue
        match = _PROPERTY.match(line)
        if match is None:
            continue
        if match[1] == "model":
            model = _TEXT.match(match[2])
            node.model = parse_numbers.words(model[1]) if model else None
        elif match[1] == "PerformanceStatistics":
            if node.statistics is not None:  # lines picked out of the tree, without the nodes they came from
                yield node
                node = _IoregNode()
            node.statistics = _statistics(match[2])
    yield node


def _statistics(value: str) -> dict[str, str]:
    """Return the numbers of the outermost `{"key"=number,...}`."""
    found: dict[str, str] = {}
    depth = 0
    for token in _TOKEN.finditer(value):
        if token[1] is not None:
            if depth == 1 and token[2] is not None:
                found.setdefault(token[1], token[2])
        elif token[0] in "{(":
            depth += 1
        elif token[0] in ")}":
            depth -= 1
            if depth <= 0:
                break
    return found


def _device(index: int, node: _IoregNode) -> Device:
    said = node.statistics or {}
    # The card's own memory, or the used part of the machine's.
    used, free = (parse_numbers.megabytes(said.get(key), "B") for key in ("vramUsedBytes", "vramFreeBytes"))
    total = round(used + free, 2) if used is not None and free is not None else None
    if not used and not free:
        used, free, total = parse_numbers.megabytes(said.get("In use system memory"), "B"), None, None
    busy = parse_numbers.percent(said.get("Device Utilization %"))
    return Device(
        # Registry ids change at each boot.
        id=f"apple-gpu-{index}",
        vendor=Vendor.APPLE,
        index=index,
        name=node.model or node.class_name,
        memory_used_mb=used,
        memory_free_mb=free,
        memory_total_mb=total,
        utilization_percent=busy if busy is not None else parse_numbers.percent(said.get("GPU Activity(%)")),
        power_draw_w=parse_numbers.watts(said.get("Total Power(W)")),
        temperature_c=parse_numbers.celsius(said.get("Temperature(C)")),
    )
