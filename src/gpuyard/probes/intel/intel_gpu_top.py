"""`intel_gpu_top -J`: utilisation, power and clients of one card that the i915 driver runs.

- The output is an endless array of samples that may lack its brackets, its commas, or its end. The last complete sample
  counts, else the complete members of a truncated one. The first one spans microseconds and measures nothing: if it is
  the only one, rates are unknown, and only the processes are taken. A device is as busy as its busiest engine.
- Used memory stays unknown: buffers that clients share are counted with each, and other users' clients may be hidden.
  What the clients hold for themselves, with the most that any of them shares, is a lower bound.
- The output does not name its card, so the live reading takes that from the kernel. The tool does not see cards of the
  xe driver: with such a card this probe fails, so that a later one lists all cards."""

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
from gpuyard.probes.intel.sysfs import IntelCard, list_cards, processes_of
from gpuyard.probes.run_tool import Deadline, find_tool, problem_beside, run_until

NAME = "intel_gpu_top"
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[\]{},]', re.DOTALL)


class IntelGpuTop:
    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self, timeout_s: float) -> Reading:
        deadline = Deadline(timeout_s)
        find_tool(NAME)
        cards = list_cards(self._root)
        unseen = [card.bus_id or card.identity["name"] for card in cards if card.driver != "i915"]
        if unseen:
            raise ProbeError(NAME, f"it does not support {', '.join(unseen)}: only cards of the i915 driver")
        if len(cards) > 1:
            return _read_each(cards, deadline)
        if not cards:
            try:
                return Reading(devices=(_sample(deadline),))
            except ProbeCrashed as error:
                if re.search(r"\bno\b.*\b(?:device|gpu|card)s?\b", error.message, re.IGNORECASE):
                    message = f"there is no Intel GPU under /sys/class/drm, and {error.message}"
                    raise ProbeMissing(NAME, message) from error
                raise
        return Reading(devices=(structs.replace(_sample(deadline), **cards[0].identity),))


def parse(text: str) -> Reading:
    """Parse the last complete sample with a measurement, else the truncated one, else any."""
    # printf writes nan or inf, which JSON lacks, when a counter was read twice within one clock tick.
    whole, cut = _split(re.sub(r'(":\s*)-?(?:nan|inf)\b', r"\1null", text, flags=re.IGNORECASE))
    samples = [*_samples([cut]), *_samples(whole)]
    if not samples:
        raise ProbeGarbled(NAME, "its output has no sample")
    durations = (parse_numbers.number(_members(sample, "period").get("duration")) for sample in samples)
    measured = [sample for sample, ms in zip(samples, durations, strict=True) if ms is None or ms >= 1.0]
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
        **_use(sample.get("clients")),
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


def _use(clients: Any) -> dict[str, Any]:
    """Return the processes, and a lower bound of the used memory: 0 without clients, None without figures."""
    if not isinstance(clients, dict):
        return {}
    processes, own_mb, shared = [], 0.0, []
    for client in clients.values():
        regions = _members(client, "memory") if isinstance(client, dict) else {}
        known, held = [], []
        for name in regions:  # those on the card
            region = _members(regions, name) if name.startswith(("local", "vram")) else {}
            figures = (parse_numbers.megabytes(region.get(key), "B") for key in ("resident", "total", "shared"))
            resident, total, part = figures
            known += [mb for mb in (resident, total) if mb is not None][:1]
            held += [] if resident is None else [(resident, min(resident, part or 0.0))]
        if held:
            own_mb += sum(mb - part for mb, part in held)
            shared.append(sum(part for _, part in held))
        pid = parse_numbers.process_id(client.get("pid")) if isinstance(client, dict) else None
        if pid is not None:
            memory_mb = round(sum(known), 2) if known else None
            processes.append(Process(pid=pid, memory_mb=memory_mb, name=parse_numbers.words(client.get("name"))))
    at_least_mb = None if clients and not shared else round(own_mb + max(shared, default=0.0), 2)
    return {"memory_used_at_least_mb": at_least_mb, "processes": processes_of(processes)}


def _sample(deadline: Deadline, card: IntelCard | None = None, period_ms: int = 250) -> Device:
    """Run the tool until its second sample; it never ends by itself. Without a filter it picks a card, in every
    version."""
    filters = ["-d", f"sys:{card.folder}"] if card else []
    command = [NAME, "-J", "-s", str(period_ms), *filters]
    output = run_until(command, deadline, enough=lambda text: len(_split(text.decode("utf-8", "replace"))[0]) > 1)
    return parse(output.require_success()).devices[0]


def _read_each(cards: Sequence[IntelCard], deadline: Deadline) -> Reading:
    """Run the tool once per card. A card that cannot be read is listed with a problem."""
    devices: list[Device] = []
    errors: dict[str, ProbeError] = {}
    for card in cards:
        try:
            device = _sample(deadline, card, max(100, 250 // len(cards)))
        except ProbeError as error:
            errors[card.identity["id"]] = error
            device = Device(id="", vendor=Vendor.INTEL)
        devices.append(structs.replace(device, **card.identity))
    if len(errors) == len(cards):
        raise next(iter(errors.values()))
    problems = tuple(problem_beside(error, Vendor.INTEL, card_id) for card_id, error in errors.items())
    return Reading(devices=tuple(devices), problems=problems)
