"""`amd-smi`, AMD's tool since ROCm 5.6: the JSON of its commands `list`, `static`, `metric` and `process`.

- A section that a release leaves out stays unknown; an output without any known section is rejected.
- "MB" are of 1,048,576 bytes.
- A read costs two calls, `metric` and `process`. Ids, names and power limits are read once, and again when the card
  numbers change: a card that falls off the bus renumbers those after it.
- A reading without names or processes is still a reading: a problem says what is missing."""

import time
from collections.abc import Callable

from msgspec.structs import replace

from gpuyard.errors import ProbeCrashed, ProbeGarbled
from gpuyard.model.machine_snapshot import Process, Reading, Vendor
from gpuyard.probes.amd.card_fields import (
    SECTIONS,
    Record,
    device_of,
    garbled,
    json_documents,
    parse_output,
    process_of,
    without_repeated_memory,
)
from gpuyard.probes.devices_and_processes import with_distinct_ids
from gpuyard.probes.run_tool import Deadline, OptionalCall, run_until

NAME = "amd-smi"


def parse(text: str) -> Reading:
    """Parse the JSON of `list`, `static`, `metric` or `process`."""
    try:
        records = _read_records(text)
        if records is None or (records and not any(map(_is_understood, records))):
            raise garbled(NAME, text)
        devices = with_distinct_ids(
            replace(device_of(number, record), processes=_processes(record)) for number, record in enumerate(records)
        )
        return Reading(devices=without_repeated_memory(devices))
    except RecursionError as error:
        raise ProbeGarbled(NAME, "its output is nested too deeply") from error


def _read_records(text: str) -> list[Record] | None:
    """Return the records of a bare list, of the list under "gpu_data" (ROCm 7), or of one record."""
    for document in json_documents(text):
        listed = document.get("gpu_data", [document]) if isinstance(document, dict) else document
        if isinstance(listed, list):
            records = [record for record in listed if isinstance(record, dict) and "gpu" in record]
            if records or not listed:
                return records
    return None


def merge(first: Reading, *others: Reading) -> Reading:
    """Return the devices of `first`, completed from the other readings by card number, with the best id."""
    devices = []
    for device in first.devices:
        sources = [other for reading in others for other in reading.devices if other.index == device.index]
        found = {
            field: next((value for source in sources if (value := getattr(source, field)) is not None), None)
            for field in device.__struct_fields__
            if getattr(device, field) is None
        }
        best = min((device, *sources), key=lambda each: (not each.id.startswith("GPU-"), each.id.startswith("amd-")))
        devices.append(replace(device, **{**found, "id": best.id}))
    problems = tuple(problem for reading in (first, *others) for problem in reading.problems)
    return Reading(devices=with_distinct_ids(devices), problems=problems)


class AmdSmi:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._listed: Reading | None = None
        self._static: Reading | None = None
        self._indexes: set[int | None] = set()
        self._ask_static = OptionalCall(NAME, Vendor.AMD, f"`{NAME} static`", clock)
        self._ask_process = OptionalCall(NAME, Vendor.AMD, f"`{NAME} process`", clock)

    def read(self, timeout_s: float) -> Reading:
        deadline = Deadline(timeout_s)
        # First, so that a read that runs out of time leaves less to do for the next. Without ids another probe is
        # better: a lease must not see a card under two ids.
        known = self._listed
        listed = known or self._list(deadline)
        # All sections of `metric` are slow. Guests and old releases lack some options.
        try:
            metric = _call("metric", "--usage", "--power", "--temperature", "--mem-usage", "--ecc", deadline=deadline)
        except ProbeCrashed:
            metric = _call("metric", deadline=deadline)
        indexes = {device.index for device in metric.devices}
        if known and indexes != self._indexes:
            listed = self._list(deadline)
        static = self._static or self._ask_static.ask(lambda: _call("static", deadline=deadline), deadline)
        processes = self._ask_process.ask(lambda: _call("process", deadline=deadline), deadline)
        self._indexes, self._static = indexes, None if static.problems else static
        return merge(metric, listed, static, processes)

    def _list(self, deadline: Deadline) -> Reading:
        self._listed, self._static = None, None
        listed = _call("list", deadline=deadline)
        self._listed, self._indexes = listed, {device.index for device in listed.devices}
        return listed


def _call(*arguments: str, deadline: Deadline) -> Reading:
    return parse_output(run_until((NAME, *arguments, "--json"), deadline), parse)


def _is_understood(record: Record) -> bool:
    """Return whether the record has a known section; an unreadable section is the string "N/A"."""
    for name, keys in SECTIONS.items():
        part = record.get(name)
        if isinstance(part, str) or (isinstance(part, dict) and not part.keys().isdisjoint(keys)):
            return True
    return not record.keys().isdisjoint({"bdf", "uuid", "process_list", "process_info"})


def _processes(record: Record) -> tuple[Process, ...] | None:
    entries = record.get("process_list", record.get("process_info"))
    listed = entries if isinstance(entries, list) else [entries]
    infos = [entry.get("process_info", entry) if isinstance(entry, dict) else entry for entry in listed]
    found = [process for info in infos if isinstance(info, dict) and (process := process_of(info))]
    says_none = isinstance(entries, list) and not entries
    says_none |= any(isinstance(info, str) and info.lower().startswith("no running process") for info in infos)
    return tuple(found) if found or says_none else None
