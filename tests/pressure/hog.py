"""The program of the jobs: it takes RAM step by step, touches its pages, and writes down what it holds.

    hog.py EVIDENCE NAME MB OVER HOLD [--vram MB]

It takes MB of RAM over OVER seconds, and holds them for HOLD seconds. Its start, what it holds and its end are appended
to EVIDENCE, in the lines of `tests/torture/evidence.py`: a `tick` has the MB that it holds. With --vram it takes that
much memory of its simulated GPU first; if less is free, it prints what PyTorch would, and ends with status 1.
"""

import argparse
import os
import signal
import sys
import time

_STEPS = 50
_PAGE = 4096


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("evidence")
    parser.add_argument("name")
    parser.add_argument("mb", type=float)
    parser.add_argument("over", type=float)
    parser.add_argument("hold", type=float)
    parser.add_argument("--vram", type=float, default=0.0)
    options = parser.parse_args()
    evidence = os.open(options.evidence, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    job = os.environ.get("GPUYARD_JOB_ID")
    run = f"{job}.{os.environ.get('GPUYARD_ATTEMPT', '1')}" if job is not None else options.name

    def note(what: str, *more: object) -> None:
        fields = (what, run, os.getpid(), f"{time.monotonic():.6f}", *more)
        os.write(evidence, (" ".join(map(str, fields)) + "\n").encode())

    def end(status: int) -> int:
        note("end", status)
        return status

    def stop(*_: object) -> None:
        os._exit(end(143))

    signal.signal(signal.SIGTERM, stop)
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "-1") if options.vram else "-1"
    note("start", devices, f"{options.vram:g}", options.name)
    use = take_vram(options.vram) if options.vram else None
    if options.vram and use is None:
        os.write(2, b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
        return end(1)
    held = take_ram(options.mb, options.over, lambda mb: note("tick", int(mb)))
    until = time.monotonic() + options.hold
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(0.5, left))
        note("tick", int(options.mb))
    del held
    return end(0)


def take_ram(megabytes: float, over_s: float, note) -> list[bytearray]:  # type: ignore[no-untyped-def]
    """Return blocks whose pages are all touched, taken in steps over this time."""
    held = []
    began = time.monotonic()
    for step in range(1, _STEPS + 1):
        block = bytearray(int(megabytes * 2**20 / _STEPS))
        for at in range(0, len(block), _PAGE):  # zeroed pages are not there before they are written to
            block[at] = 1
        held.append(block)
        if step % 5 == 0:
            note(megabytes * step / _STEPS)
        time.sleep(max(0.0, began + over_s * step / _STEPS - time.monotonic()))
    return held


def take_vram(megabytes: float) -> object | None:
    """Return the use of the simulated GPU, which ends with it; None if there is less free."""
    from gpuyard.errors import SimulatedOutOfMemory
    from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse, visible_device_ids

    devices = SimulatedDevices()
    use = SimulatedUse(devices)
    try:
        use.allocate(visible_device_ids(devices, os.environ)[0], megabytes)
    except SimulatedOutOfMemory:
        return None
    return use


if __name__ == "__main__":
    sys.exit(main())
