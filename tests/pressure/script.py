"""A user's script that reserves RAM with GPUScheduler and takes it: `script.py EVIDENCE NAME MB OVER HOLD RAM VRAM`."""

import os
import sys
import time

from hog import take_ram  # type: ignore[import-not-found]  # a file beside this one, which is no package here

from gpuyard import GPUScheduler


def main() -> None:
    path, name, mb, over, hold, ram, vram = sys.argv[1:]
    evidence = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def note(what: str, *more: object) -> None:
        fields = (what, name, os.getpid(), f"{time.monotonic():.6f}", *more)
        os.write(evidence, (" ".join(map(str, fields)) + "\n").encode())

    with GPUScheduler(vram=float(vram), ram=float(ram), poll_interval=0.5) as devices:
        note("start", ",".join(map(str, devices)), vram, name)
        held = take_ram(float(mb), float(over), lambda taken: note("tick", int(taken)))
        time.sleep(float(hold))
        del held
        note("end", 0)


if __name__ == "__main__":
    main()
