"""What the time of a suspension goes to, on a real card: the driver suspends and restores a PyTorch program, with and
without `Prefault`.

    python -m bench.suspend_speed [GIGABYTES] [THREADS …]

The driver lets the kernel allocate RAM, and then copies with one thread of the program. So each time is compared with a
floor, measured in the same run: RAM allocated as fast as eight threads of one program get pages that were never used
(or were), and copied at the rate of one thread.

Needs an idle NVIDIA card with driver 570 or later, PyTorch, and RAM for GIGABYTES of each program.
"""

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpuyard.engines.suspend.drivers import Cuda
from gpuyard.engines.suspend.prefault import Prefault

_HOLDER = """
import sys, torch
torch.manual_seed(3)
held = torch.randint(-2**62, 2**62, (int(float(sys.argv[1]) * 2**27),), dtype=torch.int64, device="cuda")
for line in sys.stdin:
    print(held.sum().item(), (held[::1001] * torch.arange(len(held[::1001]), device="cuda")).sum().item(), flush=True)
"""
_GB = 1 << 30
_FLOOR_THREADS = 8


def main(gigabytes: float, threads: list[int]) -> None:
    """Suspend a program without Prefault, and then one for each number of `threads`. All stay suspended until the end,
    so that none gets memory that another has used: on a virtual machine such memory is allocated much faster. Then
    suspend the first one again with each number."""
    _print_machine()
    with contextlib.ExitStack() as stack:
        fresh_s = stack.enter_context(_floor())
        programs = [stack.enter_context(_holder(gigabytes)) for _ in (0, *threads)]
        digests = [_digest(program) for program in programs]
        for program, count in zip(programs, (0, *threads), strict=True):
            _out(program, count, "fresh memory", fresh_s * gigabytes)
        for program, digest in zip(programs, digests, strict=True):
            _back(program, digest)
        used_s = stack.enter_context(_floor())
        for count in (0, threads[-1]):
            _out(programs[0], count, "memory that was used before", used_s * gigabytes)
            _back(programs[0], digests[0])


def _print_machine() -> None:
    for path in (
        "/proc/sys/kernel/osrelease", "/proc/sys/kernel/yama/ptrace_scope",
        "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/mm/transparent_hugepage/defrag",
    ):  # fmt: skip
        with contextlib.suppress(OSError):
            print(path, Path(path).read_text().strip())
    settings = "/sys/kernel/mm/transparent_hugepage/enabled"
    print("huge pages can be set:", os.access(settings, os.W_OK))
    status = Path("/proc/self/status").read_text().splitlines()
    print(*(line for line in status if line.startswith(("CapEff", "Seccomp"))))
    print("cpus", len(os.sched_getaffinity(0)))
    print(*(line for line in Path("/proc/meminfo").read_text().splitlines()[:3]))
    query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.used", "--format=csv,noheader"]
    print(subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip(), flush=True)


@contextlib.contextmanager
def _floor() -> Iterator[float]:
    """Yield the least seconds that a GB takes. The memory is kept until the end, so that nothing else gets it."""
    piece = 4 * _GB // _FLOOR_THREADS
    with mmap.mmap(-1, piece * _FLOOR_THREADS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # as the driver gets it
        view = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(view)
        with ThreadPoolExecutor(_FLOOR_THREADS) as pool:
            began = time.monotonic()
            list(pool.map(lambda place: ctypes.memset(start + place * piece, 1, piece), range(_FLOOR_THREADS)))
            allocate_s = (time.monotonic() - began) * _GB / len(memory)
        began = time.monotonic()
        ctypes.memmove(start, start + len(memory) // 2, len(memory) // 2)
        copy_s = (time.monotonic() - began) * _GB / (len(memory) // 2)
        print(
            f"{_FLOOR_THREADS} threads allocate {1 / allocate_s:.1f} GB/s, one copies {1 / copy_s:.1f} GB/s", flush=True
        )
        del view
        yield allocate_s + copy_s


@contextlib.contextmanager
def _holder(gigabytes: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _HOLDER, str(gigabytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        _digest(program)
        try:
            yield program
        finally:
            program.kill()


def _digest(program: subprocess.Popen[str]) -> str:
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write("\n")
    program.stdin.flush()
    return program.stdout.readline()


def _out(program: subprocess.Popen[str], threads: int, memory: str, floor_s: float) -> None:
    pid, before, stop = program.pid, _cpu_s(program.pid), threading.Event()
    watcher = threading.Thread(target=_watch, args=(pid, stop))
    watcher.start()
    out_s, touched = _suspend(pid, threads)
    stop.set()
    watcher.join()
    user, kernel = (now - then for now, then in zip(_cpu_s(pid), before, strict=True))
    cpu = f"program: {user:.1f} s user, {kernel:.1f} s kernel"
    ratio = f"{out_s / floor_s:.2f} times the floor of {floor_s:.2f} s"
    print(f"{threads} threads, {memory}: out {out_s:.2f} s, {ratio} ({cpu}; touched {touched})", flush=True)


def _back(program: subprocess.Popen[str], digest: str) -> None:
    driver, began = Cuda(10.0), time.monotonic()
    driver.restore(program.pid)
    back_s = time.monotonic() - began
    driver.unlock(program.pid)
    print(f"back {back_s:.2f} s, result {'same' if _digest(program) == digest else 'DIFFERENT'}", flush=True)


def _suspend(pid: int, threads: int) -> tuple[float, str]:
    driver, touched = Cuda(10.0), "nothing"
    began = time.monotonic()
    driver.lock(pid)
    locked_s = time.monotonic() - began
    if threads:
        with Prefault(pid, 1 << 40, threads) as prefault:
            driver.checkpoint(pid)
        touched = f"{prefault.touched_bytes / _GB:.1f} GB, refusal {prefault.refusal}"
    else:
        driver.checkpoint(pid)
    return time.monotonic() - began, f"{touched}; lock {locked_s:.3f} s"


def _watch(pid: int, stop: threading.Event) -> None:
    """Print how the resident memory grows, in GB per second."""
    began, resident, rates = time.monotonic(), _resident(pid), []
    at = began
    while not stop.wait(0.5):
        now, held = time.monotonic(), _resident(pid)
        rates.append(f"{(held - resident) / 2**20 / (now - at):.1f}")
        at, resident = now, held
    print("   growth every 0.5 s, GB/s:", *rates, flush=True)


def _resident(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def _cpu_s(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


if __name__ == "__main__":
    main(float((*sys.argv[1:], "35")[0]), [int(each) for each in sys.argv[2:]] or [8])
