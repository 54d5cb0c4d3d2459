import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from bench.baseline import bench_baseline
from bench.card import bench_card
from bench.code_snapshot import bench_code
from bench.contention import bench_contention
from bench.display_delay import bench_delay
from bench.guarantees import bench_guarantees
from bench.leases import bench_leases
from bench.order import bench_order
from bench.queue import bench_queue
from bench.queue_pages import bench_pages
from bench.simulate import bench_simulate
from bench.stalls import bench_stalls
from bench.versions import bench_versions
from bench.viewers import bench_viewers
from gpuyard.errors import ProbeError
from gpuyard.probes.local_machine import local_machine
from gpuyard.probes.nvidia.nvidia_smi import NvidiaSmi
from gpuyard.probes.nvidia.nvml import Nvml
from gpuyard.probes.simulated_devices import SimulatedDevices


def median_s(call: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def row(what: str, seconds: float, floor: str = "", floor_s: float | None = None) -> None:
    cost = f"{seconds * 1e6:10.1f} us" if seconds < 0.001 else f"{seconds * 1e3:10.2f} ms"
    ratio = f"{seconds / floor_s:9.2f} x {floor}" if floor_s else ""
    print(f"{what:<44}{cost}  {ratio}")


def command(*arguments: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def bench_start() -> None:
    floor = median_s(command("-c", "pass"), 20)
    row("python -c pass", floor)
    for arguments in (("--version",), ("--help",), ("devices", "--json"), ("devices",)):
        row(f"gpuyard {' '.join(arguments)}", median_s(command("-m", "gpuyard", *arguments), 10), "python", floor)


def bench_snapshot() -> None:
    machine = local_machine()
    machine.snapshot()
    row("snapshot of the whole machine, warm", median_s(machine.snapshot, 200))
    simulated = SimulatedDevices("8x80GB")
    row("reading of 8 simulated devices", median_s(lambda: simulated.read(1), 200))


def bench_nvidia() -> None:
    nvml = Nvml()
    try:
        started = time.perf_counter()
        nvml.read(10)
        first = time.perf_counter() - started
    except ProbeError as error:
        print(f"NVML is not available: {error}")
        return
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    one_call = median_s(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle), 2000)
    row("one NVML call (memory)", one_call)
    row("NVML, first read with initialization", first)
    warm = median_s(lambda: nvml.read(10), 2000)
    row("NVML, warm read of all devices", warm, "one NVML call", one_call)
    tool = median_s(lambda: subprocess.run(["nvidia-smi"], check=True, stdout=subprocess.DEVNULL), 10)
    row("nvidia-smi, one call", tool, "warm NVML read", warm)
    smi = NvidiaSmi()
    row("nvidia-smi, read by the fallback probe", median_s(lambda: smi.read(30), 10), "warm NVML read", warm)


if sys.argv[1:2] == ["queue"]:
    bench_queue(sys.argv[2:])
elif sys.argv[1:2] == ["card"]:
    bench_card(sys.argv[2:])
elif sys.argv[1:2] == ["simulate"]:
    bench_simulate(sys.argv[2:])
elif sys.argv[1:2] == ["guarantees"]:
    bench_guarantees(sys.argv[2:])
elif sys.argv[1:2] == ["pages"]:
    bench_pages()
elif sys.argv[1:2] == ["viewers"]:
    bench_viewers()
elif sys.argv[1:2] == ["delay"]:
    bench_delay()
elif sys.argv[1:2] == ["order"]:
    bench_order(sys.argv[2:])
elif sys.argv[1:2] == ["code"]:
    bench_code()
elif sys.argv[1:2] == ["stalls"]:
    bench_stalls(sys.argv[2:])
elif sys.argv[1:2] == ["contention"]:
    bench_contention()
elif sys.argv[1:2] == ["baseline"]:
    bench_baseline(sys.argv[2:])
elif sys.argv[1:2] == ["versions"]:
    bench_versions(sys.argv[2:])
else:
    bench_start()
    bench_snapshot()
    bench_leases(row)
    bench_nvidia()
    bench_queue([])
    bench_viewers()
    bench_pages()
    bench_stalls([])
    bench_contention()
    bench_code()
