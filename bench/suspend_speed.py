"""What the time of a suspension goes to, on a real card: the driver suspends and restores a PyTorch program, with and
without `Prefault`; and what pinned memory costs.

    python -m bench.suspend_speed [GIGABYTES] [THREADS …]

Needs an idle NVIDIA card with driver 570 or later, PyTorch, and 1.5 times GIGABYTES of RAM.
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
from gpuyard.engines.suspend.prefault import Prefault, _mappings, subtract

_HOLDER = """
import sys, torch
torch.manual_seed(3)
held = torch.randint(-2**62, 2**62, (int(float(sys.argv[1]) * 2**27),), dtype=torch.int64, device="cuda")
for line in sys.stdin:
    print(held.sum().item(), (held[::1001] * torch.arange(len(held[::1001]), device="cuda")).sum().item(), flush=True)
"""
_POPULATE_WRITE, _HUGE = 23, 14
_GB = 1 << 30


def main(gigabytes: float, threads: list[int]) -> None:
    _print_machine()
    with _holder(gigabytes) as program:
        _round(program, 0, watches=True)
        for count in threads:
            _round(program, count, watches=count == threads[0])
    two = gigabytes / 2
    with _holder(two) as first, _holder(two) as second:
        for count in (0, threads[-1]):
            began = time.monotonic()
            with ThreadPoolExecutor() as pool:
                list(pool.map(_suspend, (first.pid, second.pid), (count, count)))
            print(f"two of {two:g} GB side by side, {count} threads each: {time.monotonic() - began:.2f} s", flush=True)
            for each in (first, second):
                Cuda(10.0).restore(each.pid)
                Cuda(10.0).unlock(each.pid)
    _pinned(gigabytes)


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


def _round(program: subprocess.Popen[str], threads: int, *, watches: bool) -> None:
    pid, before = program.pid, _digest(program)
    user, kernel = _cpu_s(pid)
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(pid, stop))
    if watches:
        watcher.start()
    out_s, touched = _suspend(pid, threads)
    stop.set()
    user, kernel = (now - then for now, then in zip(_cpu_s(pid), (user, kernel), strict=True))
    began = time.monotonic()
    Cuda(10.0).restore(pid)
    back_s = time.monotonic() - began
    Cuda(10.0).unlock(pid)
    print(
        f"{threads} threads: out {out_s:.2f} s (program: {user:.1f} s user, {kernel:.1f} s kernel; touched {touched}), "
        f"back {back_s:.2f} s, result {'same' if _digest(program) == before else 'DIFFERENT'}",
        flush=True,
    )


def _suspend(pid: int, threads: int) -> tuple[float, str]:
    driver, touched = Cuda(10.0), "nothing"
    began = time.monotonic()
    driver.lock(pid)
    locked_s = time.monotonic() - began
    if threads:
        with Prefault(pid, 1 << 40, threads) as prefault:
            driver.suspend(pid)
        touched = f"{prefault.touched_bytes / _GB:.1f} GB, refusal {prefault.refusal}"
    else:
        driver.suspend(pid)
    return time.monotonic() - began, f"{touched}; lock {locked_s:.3f} s"


def _watch(pid: int, stop: threading.Event) -> None:
    """Print each change of the mappings, and how the resident memory grows."""
    known, anonymous, began, shown, resident = _lines(pid), _mappings(pid), time.monotonic(), 0.0, 0
    while not stop.wait(0.01):
        now, lines = time.monotonic() - began, _lines(pid)
        for line in sorted(lines - known):
            size = (int(line.split("-")[1].split()[0], 16) - int(line.split("-")[0], 16)) / 2**20
            if size >= 4:
                print(f"   {now:6.2f} s  + {size:9.1f} MB  {line}")
        gone = sum(int(line.split("-")[1].split()[0], 16) - int(line.split("-")[0], 16) for line in known - lines)
        if gone > 4 << 20:
            print(f"   {now:6.2f} s  - {gone / 2**20:9.1f} MB of mappings changed or gone")
        known = lines
        if now - shown >= 0.5:
            shown, before, resident = now, resident, _resident(pid)
            print(f"   {now:6.2f} s  resident {resident / 2**20:8.2f} GB  + {(resident - before) / 2**20:6.2f}")
    new = subtract(_mappings(pid), anonymous)
    print(
        "   new anonymous:",
        [f"{(end - begin) / _GB:.2f} GB" for begin, end in new if end - begin > 4 << 20],
        flush=True,
    )


def _lines(pid: int) -> set[str]:
    return set(Path(f"/proc/{pid}/maps").read_text().splitlines())


def _resident(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def _cpu_s(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


def _pinned(gigabytes: float) -> None:
    """Print what it costs to have pinned memory: as PyTorch allocates it, and allocated on many threads first."""
    import torch

    size = int(gigabytes * _GB)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    began = time.monotonic()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = (ctypes.c_char * size).from_buffer(memory)
    address, libc = ctypes.addressof(view), ctypes.CDLL(None, use_errno=True)
    advised = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _HUGE)
    step = 64 << 20

    def populate(start: int) -> int:
        length = min(step, size - start)
        return int(libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _POPULATE_WRITE))

    with ThreadPoolExecutor(8) as pool:
        codes = set(pool.map(populate, range(0, size, step)))
    populated_s = time.monotonic() - began
    code = torch.cuda.cudart().cudaHostRegister(address, size, 0)
    print(
        f"{gigabytes:g} GB pinned by hand: populated in {populated_s:.2f} s (advice {advised}, {codes}), "
        f"registered after {time.monotonic() - began:.2f} s ({code})"
    )
    target = torch.frombuffer(memory, dtype=torch.uint8)
    for name, to, come in (("out", target, source), ("back", source, target), ("out again", target, source)):
        began = time.monotonic()
        to.copy_(come, non_blocking=True)
        torch.cuda.synchronize()
        took = time.monotonic() - began
        print(f"  {name}: {took:.2f} s, {gigabytes / took:.1f} GB/s", flush=True)
    torch.cuda.cudart().cudaHostUnregister(address)
    del target, view, source
    began = time.monotonic()
    torch.empty(16 * _GB, dtype=torch.uint8, pin_memory=True)
    print(f"16 GB pinned by PyTorch: {time.monotonic() - began:.2f} s", flush=True)


if __name__ == "__main__":
    main(float((*sys.argv[1:], "35")[0]), [int(each) for each in sys.argv[2:]] or [8, 4, 14])
