"""`intel_gpu_top -J`: utilisation, power and clients of one card that the i915 driver runs.

Rules:
- The output is an endless array of samples that may lack its brackets, its commas, or its end. The complete
  members of a truncated sample count, but any complete sample is better.
- The last usable sample counts. The first one spans microseconds and measures nothing: if it is the only
  one, rates are unknown. The processes are no rate, and are taken even from such a sample.
- A device is as busy as the busiest of its engines.
- Used memory stays unknown: buffers that clients share are counted with each, and other users' clients may be hidden.
  What the clients hold for themselves, with the most that any of them shares, is a lower bound.
- The output does not name its card, so the live reading takes that from the kernel. The tool
  does not see cards of the xe driver: with such a card this probe fails, so that a later one lists all cards.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from gpuyard.errors import ProbeCrashed, ProbeError, ProbeGarbled, ProbeMissing
from gpuyard.model.machine_snapshot import Device, Process, Reading, Vendor
from gpuyard.probes import parse_numbers
from gpuyard.probes.intel.intel_cards import IntelCard, list_cards, processes_of
from gpuyard.probes.run_tool import Deadline, find_tool, problem_beside, run_until

NAME = "intel_gpu_top"
_PERIOD_MS = 250
_SHORTEST_PERIOD_MS = 1.0
_SHORT_OF_TIME_MS = 100

_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[\]{},]', re.DOTALL)
# printf writes nan or inf, which JSON lacks, when a counter was read twice within one clock tick.
_NO_NUMBER = re.compile(r'(":\s*)-?(?:nan|inf)\b', re.IGNORECASE)

_NO_CARD = re.compile(r"\bno\b.*\b(?:device|gpu|card)s?\b", re.IGNORECASE)


class IntelGpuTop:
    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self, timeout_s: float) -> Reading:
        deadline = Deadline(timeout_s)
        find_tool(NAME)
        cards = list_cards(self._root)
        unseen = [card.bus_id or card.name for card in cards if card.driver != "i915"]
        if unseen:
            raise ProbeError(NAME, f"it does not support {', '.join(unseen)}: only cards of the i915 driver")
        if not cards:
            return _read_unlisted(deadline)
        if len(cards) > 1:
            return _read_each(cards, deadline)
        return Reading(devices=(structs.replace(_sample(command(), deadline), **cards[0].identity),))


def command(card: IntelCard | None = None, period_ms: int = _PERIOD_MS) -> list[str]:
    """Return the command. Without a filter the tool picks a card itself, in every version."""
    filters = ["-d", f"sys:{card.folder}"] if card else []
    return [NAME, "-J", "-s", str(period_ms), *filters]


def parse(text: str) -> Reading:
    """Parse the last complete sample with a measurement, else the truncated one, else any."""
    whole, cut = _split(_NO_NUMBER.sub(r"\1null", text))
    samples = [*_samples([cut]), *_samples(whole)]
    if not samples:
        raise ProbeGarbled(NAME, "its output has no sample")
    measured = [sample for sample in samples if _is_measured(sample)]
    sample = (measured or samples)[-1]
    rates = sample if measured else {}
    engines, power = _members(rates, "engines"), _members(rates, "power")
    busy = [parse_numbers.percent(_members(engines, name).get("busy")) for name in engines]
    device = Device(
        id="intel-0",
        vendor=Vendor.INTEL,
        index=0,
        utilization_percent=max((value for value in busy if value is not None), default=None),
        # Not `Package`, which is the whole processor.
        power_draw_w=parse_numbers.watts(power if "value" in power else power.get("GPU")),
        memory_used_at_least_mb=_used_at_least(sample.get("clients")),
        processes=_processes(sample.get("clients")),
    )
    return Reading(devices=(device,))


def _split(text: str) -> tuple[list[str], str]:
    """Return the complete objects in the stream, and the complete members of a truncated one."""
    whole: list[str] = []
    closers: list[str] = []
    start = kept = 0
    for token in _STRUCTURE.finditer(text):
        mark = token[0]
        if mark == "{" or (mark == "[" and closers):
            start = start if closers else token.start()
            closers.append("}" if mark == "{" else "]")
            kept = token.end()
        elif mark == "," and closers:
            kept = token.start()
        elif mark in "}]" and closers:
            closers.pop()
            kept = token.end()
            if not closers:
                whole.append(text[start:kept])
    return whole, text[start:kept] + "".join(reversed(closers)) if closers else ""


def _samples(objects: Iterable[str]) -> Iterable[Mapping[str, Any]]:
    for text in objects:
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(text, strict=False)
            if isinstance(found, dict) and (_members(found, "period") or _members(found, "engines")):
                yield found


def _members(sample: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = sample.get(key)
    return found if isinstance(found, dict) else {}


def _is_measured(sample: Mapping[str, Any]) -> bool:
    duration = parse_numbers.number(_members(sample, "period").get("duration"))
    return duration is None or duration >= _SHORTEST_PERIOD_MS


def _processes(clients: Any) -> tuple[Process, ...] | None:
    if not isinstance(clients, dict):
        return None
    found = (_process(client) for client in clients.values() if isinstance(client, dict))
    return processes_of(process for process in found if process is not None)


def _process(client: Mapping[str, Any]) -> Process | None:
    pid = parse_numbers.process_id(client.get("pid"))
    if pid is None:
        return None
    known = []
    for region in _device_regions(client):
        sizes = (parse_numbers.megabytes(region.get(key), "B") for key in ("resident", "total"))
        known += [size for size in sizes if size is not None][:1]
    memory_mb = round(sum(known), 2) if known else None
    return Process(pid=pid, memory_mb=memory_mb, name=parse_numbers.words(client.get("name")))


def _device_regions(client: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the client's regions of memory on the card."""
    regions = _members(client, "memory")
    return [_members(regions, name) for name in regions if name.startswith(("local", "vram"))]


def _used_at_least(clients: Any) -> float | None:
    """Return a lower bound of the used memory: 0 without clients, None if no client has a known figure."""
    if not isinstance(clients, dict):
        return None
    own_mb, shared = 0.0, []
    for client in clients.values():
        regions = _device_regions(client) if isinstance(client, dict) else []
        sizes = [[parse_numbers.megabytes(each.get(key), "B") for key in ("resident", "shared")] for each in regions]
        known = [(held, min(held, part or 0.0)) for held, part in sizes if held is not None]
        if known:
            own_mb += sum(held - part for held, part in known)
            shared.append(sum(part for _, part in known))
    return None if clients and not shared else round(own_mb + max(shared, default=0.0), 2)


def _has_two_samples(output: bytes) -> bool:
    return len(_split(output.decode("utf-8", "replace"))[0]) > 1


def _sample(argv: Sequence[str], deadline: Deadline) -> Device:
    """Run the tool until its second sample; it never ends by itself."""
    output = run_until(argv, deadline, enough=_has_two_samples)
    return parse(output.require_success()).devices[0]


def _read_unlisted(deadline: Deadline) -> Reading:
    """Read without a card list. If the tool finds no card either, raise ProbeMissing, not a crash."""
    try:
        return Reading(devices=(_sample(command(), deadline),))
    except ProbeCrashed as error:
        if _NO_CARD.search(error.message):
            raise ProbeMissing(NAME, f"there is no Intel GPU under /sys/class/drm, and {error.message}") from error
        raise


def _read_each(cards: Sequence[IntelCard], deadline: Deadline) -> Reading:
    """Run the tool once per card. A card that cannot be read is listed with a problem."""
    period_ms = max(_SHORT_OF_TIME_MS, _PERIOD_MS // len(cards))
    devices: list[Device] = []
    errors: dict[str, ProbeError] = {}
    for card in cards:
        try:
            devices.append(_sample(command(card, period_ms), deadline))
        except ProbeError as error:
            errors[card.id] = error
            devices.append(Device(id="intel-0", vendor=Vendor.INTEL))
    if len(errors) == len(cards):
        raise next(iter(errors.values()))
    named = tuple(structs.replace(device, **card.identity) for device, card in zip(devices, cards, strict=True))
    problems = tuple(problem_beside(error, Vendor.INTEL, card_id) for card_id, error in errors.items())
    return Reading(devices=named, problems=problems)
