"""Make the texts of a reading printable: any user can give a process any name, and a tool may print anything."""

from msgspec.structs import replace

from gpuyard.core.printable_text import printable
from gpuyard.core.snapshot import Device, Problem, Process, Reading


def printable_reading(reading: Reading) -> Reading:
    """Return the reading with printable texts: names of processes and devices, faults, and messages of tools."""
    devices = tuple(map(_printable_device, reading.devices))
    return Reading(devices=devices, problems=tuple(map(printable_problem, reading.problems)))


def printable_problem(problem: Problem) -> Problem:
    if problem.message.isprintable() and (problem.hint or "").isprintable():
        return problem
    hint = None if problem.hint is None else printable(problem.hint)
    return replace(problem, message=printable(problem.message), hint=hint)


def _printable_device(device: Device) -> Device:
    texts = {name: getattr(device, name) for name in ("id", "name", "parent", "pci_bus_id", "fault")}
    if any(text is not None and not text.isprintable() for text in texts.values()):
        device = replace(device, **{name: text and printable(text) for name, text in texts.items()})
    processes = device.processes or ()
    if all(process.name is None or process.name.isprintable() for process in processes):
        return device
    return replace(device, processes=tuple(map(_printable_process, processes)))


def _printable_process(process: Process) -> Process:
    return process if process.name is None else replace(process, name=printable(process.name))
