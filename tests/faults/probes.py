"""Faults of the probes: tools, fallback chains, figures, the host's limits, simulated devices."""

from tests.faults.fault import Fault

_PROBES = "src/gpuyard/probes"
_TESTS = "tests/unit/probes"

FAULTS = (
    Fault(
        id="probes-tools-children-are-left",
        file=f"{_PROBES}/common/run_tool.py",
        old="        os.killpg(process.pid, signal.SIGKILL)\n",
        new="        process.kill()\n",
        breaks="A vendor's tool that hangs leaves its children behind at every reading.",
        near=(f"{_TESTS}/common/test_run_tool.py",),
    ),
    Fault(
        id="probes-hung-tool-is-waited-for",
        file=f"{_PROBES}/common/run_tool.py",
        old="        while selector.get_map() and (left := deadline - time.monotonic()) > 0:\n",
        new="        while selector.get_map() and (left := deadline - time.monotonic() + 30.0) > 0:\n",
        breaks="A tool that hangs delays the snapshot of all GPUs by half a minute.",
        near=(f"{_TESTS}/common/test_run_tool.py",),
    ),
    Fault(
        id="probes-vanished-gpu-is-forgotten",
        file=f"{_PROBES}/fallback_chain.py",
        old="        gone = tuple(self._gone(step, reading.devices))\n",
        new="        gone = ()\n",
        breaks="A GPU that fell off the bus is not listed at all instead of as unhealthy.",
        near=(f"{_TESTS}/test_fallback_chain.py",),
    ),
    Fault(
        id="probes-missing-register-is-a-figure",
        file=f"{_PROBES}/common/parse_numbers.py",
        old="return (value, unit) if math.isfinite(value) and value not in _SENTINELS else None",
        new="return (value, unit) if math.isfinite(value) else None",
        breaks="A missing register is shown as 65535 degrees, and keeps jobs from starting.",
        near=(f"{_TESTS}/common/test_parse_numbers.py",),
    ),
    Fault(
        id="probes-gigabytes-of-a-thousand",
        file=f"{_PROBES}/common/parse_numbers.py",
        old='    **dict.fromkeys(("gb", "gib"), 1024.0),\n',
        new='    **{"gb": 1024.0, "gib": 1000.0},\n',
        breaks="A card is shown with less memory than it has if its tool prints GiB.",
        near=(f"{_TESTS}/common/test_parse_numbers.py",),
    ),
    Fault(
        id="probes-loosest-memory-limit-wins",
        file=f"{_PROBES}/host.py",
        old="        if total is None or limit.size < total:\n",
        new="        if total is None or limit.size > total:\n",
        breaks="In a container, jobs are started by the memory of the whole machine, and killed.",
        near=(f"{_TESTS}/test_host.py",),
    ),
    Fault(
        id="probes-failed-probe-does-not-back-off",
        file=f"{_PROBES}/common/probe_calls.py",
        old="min(_LONGEST_S, 2.0**doublings)",
        new="0.0",
        breaks="A tool that fails is started again at every reading.",
        near=(f"{_TESTS}/common/test_backoff.py",),
    ),
    Fault(
        id="probes-shares-without-a-lock",
        file="src/gpuyard/simulated_usage.py",
        old="            lock(descriptor)\n            yield\n",
        new="            yield\n",
        breaks="Two processes get the same memory of a simulated GPU.",
        near=("tests/unit/test_simulated_usage.py",),
    ),
    Fault(
        id="probes-amd-memory-from-two-sources",
        file="src/gpuyard/probes/amd/amdsmi_library.py",
        old="Reading(devices=tuple(self._kernel.with_processes(without_repeated_memory(devices))))",
        new="Reading(devices=without_repeated_memory(devices))",
        breaks="On AMD, a job seems to grow each second by the difference of two sources, and is suspended.",
        near=(f"{_TESTS}/test_amd_kernel_memory.py",),
    ),
    Fault(
        id="probes-amd-pids-outside-of-the-container",
        file="src/gpuyard/probes/amd/kernel_memory.py",
        old=" if sees_all_processes(self._root) else {}",
        new="",
        breaks="In a container with an AMD card, the memory of other programs is counted for a job.",
        near=(f"{_TESTS}/test_amd_kernel_memory.py",),
    ),
    Fault(
        id="probes-impossible-load-of-a-process",
        file="src/gpuyard/probes/nvidia/process_loads.py",
        old="        if is_newer and sample.smUtil <= _WHOLE:\n",
        new="        if is_newer:\n",
        breaks="A process is shown with a load of 4,000,000%, and that load is counted.",
        near=("tests/integration/test_nvml_loads.py",),
    ),
)
