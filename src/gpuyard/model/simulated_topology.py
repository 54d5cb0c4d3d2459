"""The links of simulated devices: `8x80GB:links=0-3,4-7:nodes=0-3,4-7`.

`links` are groups of devices that NVLink joins, `nodes` the NUMA nodes, in order. Devices are counted from 0 through
the whole text. `+` puts several numbers or ranges into one group, as in `0-1+6-7`.
"""

import re
from collections.abc import Sequence
from itertools import combinations

from gpuyard.errors import UserError
from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.model.topology import Link, LinkKind, Topology, link_by_nodes, merge

_SPAN = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?", re.ASCII)
_EXAMPLE = "write it as 8x80GB:links=0-3,4-7 or 8x80GB:links=0-3,4-7:nodes=0-3,4-7"
_KEYS = ("links", "nodes")


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Return the text of the devices, and the texts of `links` and `nodes`, as far as they are there."""
    first = re.search(r":\s*\w+\s*=", spec, re.ASCII)
    if first is None:
        return spec, {}
    found: dict[str, str] = {}
    for part in spec[first.start() + 1 :].split(":"):
        key, equals, groups = (text.strip() for text in part.partition("="))
        if not equals or key not in _KEYS:
            raise UserError(f"'{part}' says nothing about simulated devices", hint=_EXAMPLE)
        if key in found:
            raise UserError(f"'{spec}' has {key} twice", hint="put all groups into one, separated by commas")
        found[key] = groups
    return spec[: first.start()], found


def parse_topology(spec: str, devices: Sequence[Device]) -> Topology:
    """Return the links and NUMA nodes that the text gives to the devices."""
    _, texts = split_spec(spec)
    linked, nodes = (_groups(key, texts.get(key), devices) for key in _KEYS)
    by_id = {device.id: node for node, group in enumerate(nodes) for device in group}
    by_node = Topology(links=tuple(link_by_nodes([device.id for device in devices], by_id)), nodes=by_id)
    links = tuple(_join(one, other) for group in linked for one, other in combinations(group, 2))
    return merge(by_node, Topology(links=links))


def _join(one: Device, other: Device) -> Link:
    if one.vendor is not other.vendor:
        raise UserError(f"links join {one.id} and {other.id}, GPUs of two vendors", hint=_EXAMPLE)
    if one.vendor is Vendor.AMD:
        return Link(one=one.id, other=other.id, kind=LinkKind.XGMI)
    # As many as an A100 has to each NVSwitch, or to its neighbour.
    return Link(one=one.id, other=other.id, kind=LinkKind.NVLINK, count=12)


def _groups(key: str, text: str | None, devices: Sequence[Device]) -> list[list[Device]]:
    if text is None:
        return []
    groups, taken = [], set()
    for group in text.split(","):
        numbers = [number for span in group.split("+") for number in _numbers(key, span.strip(), len(devices))]
        for number in numbers:
            if number in taken:
                raise UserError(f"GPU {number} is in {key} twice", hint="a simulated GPU is in one group")
            taken.add(number)
        groups.append([devices[number] for number in numbers])
    return groups


def _numbers(key: str, span: str, count: int) -> range:
    match = _SPAN.fullmatch(span)
    if match is None:
        raise UserError(f"'{span}' in {key}= is no GPU and no range of GPUs", hint=_EXAMPLE)
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise UserError(f"'{span}' in {key}= is an empty range", hint=_EXAMPLE)
    if last >= count:
        raise UserError(
            f"{key}= names GPU {last}, and there are {count} simulated GPUs", hint=f"they are numbered 0 to {count - 1}"
        )
    return range(first, last + 1)
