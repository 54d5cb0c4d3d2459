"""A user's script that leases GPUs with GPUScheduler, for the torture run: `script.py EVIDENCE NAME MB SECONDS GPUS`.

MB is `-` for whole devices. Writes its start and end as job.py does.
"""

import os
import sys
import time

from gpuyard import GPUScheduler


def main() -> None:
    path, name, mb, seconds, gpus = sys.argv[1:]
    evidence = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def note(what: str, *more: object) -> None:
        fields = (what, name, os.getpid(), f"{time.monotonic():.6f}", *more)
        os.write(evidence, (" ".join(map(str, fields)) + "\n").encode())

    vram = None if mb == "-" else float(mb)
    with GPUScheduler(num_gpus=int(gpus), vram=vram, max_wait_time=60, quiet=True, poll_interval=1) as devices:
        note("start", ",".join(map(str, devices)), mb, name)
        until = time.monotonic() + float(seconds)
        while time.monotonic() < until:
            time.sleep(0.2)
            note("tick", 0)
        note("end", 0)


if __name__ == "__main__":
    main()
