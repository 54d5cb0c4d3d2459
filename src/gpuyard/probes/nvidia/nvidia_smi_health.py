"""The health of a card in the XML of `nvidia-smi`: ECC errors, remapped rows, throttling and the PCIe link.

Sections and fields were renamed over the years; a field that is missing or says N/A is unknown.
"""

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from msgspec.structs import replace

from gpuyard.core.health_figures import HealthFigures, Throttle, XidEvent
from gpuyard.core.scheduling.numbers import IDLE_PERCENT
from gpuyard.core.snapshot import Device
from gpuyard.probes.common.parse_numbers import whole

_NAMES = {
    Throttle.SW_THERMAL: "sw_thermal_slowdown",
    Throttle.HW_THERMAL: "hw_thermal_slowdown",
    Throttle.POWER_BRAKE: "hw_power_brake_slowdown",
    Throttle.HW_SLOWDOWN: "hw_slowdown",
}
_REASONS = ("clocks_event_reason", "clocks_throttle_reason")


def health_in(card: Element, utilization_percent: float | None) -> HealthFigures:
    width, most = _lanes(card, "current_link_width"), _lanes(card, "max_link_width")
    is_busy = (utilization_percent or 0.0) > IDLE_PERCENT
    is_certain = width is not None and most is not None and (is_busy or width >= most)
    return HealthFigures(
        ecc_uncorrected=_uncorrected(card),
        remap_pending=_yes(card.findtext("remapped_rows/remapped_row_pending")),
        remap_failed=_yes(card.findtext("remapped_rows/remapped_row_failure")),
        throttle=_throttle(card),
        link_width=width if is_certain else None,
        link_width_max=most,
    )


def with_xids(devices: Sequence[Device], xids: Mapping[str, tuple[XidEvent, ...]]) -> tuple[Device, ...]:
    """Return the devices with the Xids of their cards, given by PCI bus id."""
    found = []
    for device in devices:
        events = xids.get(device.pci_bus_id or "") if device.parent is None else None
        health = None if events is None else replace(device.health or HealthFigures(), xids=events)
        found.append(device if health is None else replace(device, health=health))
    return tuple(found)


def _uncorrected(card: Element) -> int | None:
    section = card.find("ecc_errors/volatile")
    if section is None:
        return None
    older = whole(section.findtext("double_bit/total"))
    if older is not None:
        return older
    counts = [whole(each.text) for each in section if "uncorrectable" in each.tag]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _throttle(card: Element) -> tuple[Throttle, ...] | None:
    for name in _REASONS:
        section = card.find(f"{name}s")
        if section is not None:
            states = {each: (section.findtext(f"{name}_{field}") or "").strip() for each, field in _NAMES.items()}
            is_known = any(state in ("Active", "Not Active") for state in states.values())
            return tuple(each for each, state in states.items() if state == "Active") if is_known else None
    return None


def _lanes(card: Element, field: str) -> int | None:
    text = card.findtext(f"pci/pci_gpu_link_info/link_widths/{field}")
    return None if text is None else whole(text.strip().removesuffix("x"))


def _yes(text: str | None) -> bool | None:
    return {"Yes": True, "No": False}.get((text or "").strip())
