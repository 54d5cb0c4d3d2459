"""Whatever a driver or a tool says about devices and processes enters gpuyard as printable text."""

from gpuyard.errors import ProbeCrashed
from gpuyard.model.machine_snapshot import Device, Problem, Process, Reading, Vendor
from gpuyard.probes.fallback_chain import FallbackChain, check_probes, printable_reading
from gpuyard.probes.local_machine import replay
from gpuyard.system.clock import SystemClock

NASTY = "\x1b]0;x\x07\n\u202e"
SHOWN = "\\x1b]0;x\\x07\\n\\u202e"


class HostileProbe:
    name = "hostile"
    vendor = Vendor.NVIDIA
    may_hang = False

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    def read(self, timeout_s: float) -> Reading:
        if self._fails:
            raise ProbeCrashed("tool", f"it said {NASTY}", hint=NASTY)
        process = Process(pid=7, name=NASTY)
        device = Device(id=f"GPU{NASTY}", vendor=Vendor.NVIDIA, name=NASTY, fault=NASTY, processes=(process,))
        return Reading(devices=(device,), problems=(Problem(source="tool", kind="failed", message=NASTY),))


def test_whatever_a_tool_says_or_has_said_is_escaped() -> None:
    reading = FallbackChain(Vendor.NVIDIA, [HostileProbe(fails=False)], SystemClock()).read(1.0)
    (device,) = reading.devices
    assert (device.id, device.name, device.fault) == (f"GPU{SHOWN}", SHOWN, SHOWN)
    assert [process.name for process in device.processes or ()] == [SHOWN]
    assert [problem.message for problem in reading.problems] == [SHOWN]
    (check,) = check_probes({Vendor.NVIDIA: [HostileProbe(fails=True)]}, 1.0)
    (problem,) = check.problems
    assert (problem.message, problem.hint) == (f"it said {SHOWN}", SHOWN)
    output = "index, uuid, name, memory.total [MiB]\n0, GPU-1, \x1b[31mEvil\u202e, 24576 MiB\n"
    (device,) = replay("nvidia-smi-csv", output.encode()).devices
    assert device.name == "\\x1b[31mEvil\\u202e"
    device = Device(id="G0", vendor=Vendor.AMD, name="Radeon", processes=(Process(pid=1, name="python"),))
    reading = Reading(devices=(device,), problems=(Problem(source="x", kind="failed", message="no"),))
    assert printable_reading(reading) == reading
