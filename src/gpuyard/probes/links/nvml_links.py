"""Links between NVIDIA cards through NVML: what two cards share on PCIe, and their NVLinks.

- A link to another card counts for this pair. Links to an NVSwitch join all cards that have some: such a pair has as
  many as the card with fewer, unless the driver denies that the two reach each other.
- A figure that the driver does not report is unknown. A lost card has unknown links; the others' are read.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from types import ModuleType
from typing import Any

from msgspec import Struct

from gpuyard.core.snapshot import Device
from gpuyard.core.topology import Link, LinkKind, Topology
from gpuyard.errors import ProbeCrashed
from gpuyard.probes.common.device_ids import pci_bus_id
from gpuyard.probes.nvidia.nvml import import_nvml

_SHARED = {
    0: LinkKind.PCIE_SWITCH,  # two processors on one board
    10: LinkKind.PCIE_SWITCH,
    20: LinkKind.PCIE_SWITCH,
    30: LinkKind.HOST_BRIDGE,
    40: LinkKind.SAME_NODE,
    50: LinkKind.ACROSS_NODES,
}


class _LinkedCard(Struct, frozen=True, kw_only=True):
    """`to_cards` is the number of NVLinks by the bus id of the card at the other end."""

    device: Device
    handle: Any
    to_cards: Counter[str | None]
    to_switches: int


def read_nvml_links(devices: Sequence[Device]) -> Topology:
    """Return the links between these NVIDIA cards. Raises ProbeError if NVML cannot be used."""
    nvml = import_nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ProbeCrashed("nvml", f"NVML says: {error}") from error
    try:
        cards = [card for device in devices if (card := _read_card(nvml, device)) is not None]
        return Topology(links=tuple(_nvml_links(nvml, cards)))
    finally:
        with contextlib.suppress(nvml.NVMLError):  # the probe that initialised it first has closed it
            nvml.nvmlShutdown()


def _read_card(nvml: ModuleType, device: Device) -> _LinkedCard | None:
    handle = _ask(nvml, "nvmlDeviceGetHandleByPciBusId", device.pci_bus_id)
    if handle is None:
        return None
    to_cards: Counter[str | None] = Counter()
    to_switches = 0
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = _ask(nvml, "nvmlDeviceGetNvLinkState", handle, number)
        if state is None:
            break  # the card has no more
        if state != nvml.NVML_FEATURE_ENABLED:
            continue
        if _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            to_switches += 1
        elif (remote := _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, number)) is not None:
            to_cards[pci_bus_id(_text(remote.busId))] += 1
    return _LinkedCard(device=device, handle=handle, to_cards=to_cards, to_switches=to_switches)


def _nvml_links(nvml: ModuleType, cards: Sequence[_LinkedCard]) -> Iterator[Link]:
    for one, other in combinations(cards, 2):
        count = one.to_cards[other.device.pci_bus_id] or _switched(nvml, one, other)
        kind = LinkKind.NVLINK if count else None
        if kind is None:
            shared = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", one.handle, other.handle)
            kind = _SHARED.get(shared)
        if kind is not None:
            yield Link(one=one.device.id, other=other.device.id, kind=kind, count=count or None)


def _switched(nvml: ModuleType, one: _LinkedCard, other: _LinkedCard) -> int:
    """Return the number of links through NVSwitches."""
    count = min(one.to_switches, other.to_switches)
    if not count:
        return 0
    status = _ask(nvml, "nvmlDeviceGetP2PStatus", one.handle, other.handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return count if status in (None, nvml.NVML_P2P_STATUS_OK) else 0


def _ask(nvml: ModuleType, function: str, *arguments: Any) -> Any:
    """Return the driver's answer, or None if it has none, or if the driver or the package lacks the function."""
    call = getattr(nvml, function, None)
    try:
        return None if call is None else call(*arguments)
    except nvml.NVMLError:
        return None


def _text(raw: str | bytes) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
