"""A program that holds memory of a simulated GPU and can park it itself, as `gpuyard.torch` does with tensors:
`python parking_job.py --vram 1500 GATE`. It keeps 256 MB on the GPU when it has parked, as a CUDA context would.

It prints each move, and works until the file GATE exists. With `--stuck` it never comes to the end of a step; with
`--refuses` it does not take its memory back while the file GATE.full exists. While GATE.unsaid exists it does not
answer that it has parked.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse, visible_device_ids
from gpuyard.scripting.park_tensors import ParkListener
from gpuyard.system.parking_protocol import own_attempt, path_of

COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()))
CONTEXT_MB = 256.0


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--vram", type=float, required=True, help="MB of a simulated GPU")
    parser.add_argument("--stuck", action="store_true")
    parser.add_argument("gate", type=Path)
    options = parser.parse_args()
    devices = SimulatedDevices()
    device_id = visible_device_ids(devices, dict(os.environ))[0]
    parkable_mb = float(options.vram) - CONTEXT_MB

    with SimulatedUse(devices) as usage:
        usage.allocate(device_id, options.vram)

        def park() -> int:
            usage.allocate(device_id, -parkable_mb)
            say("parked")
            while options.gate.with_suffix(".unsaid").exists():
                time.sleep(0.005)
            return round(parkable_mb * 2**20)

        def bring_back() -> None:
            if options.gate.with_suffix(".full").exists():
                raise RuntimeError("CUDA out of memory")
            usage.allocate(device_id, parkable_mb)
            say("returned")

        attempt = own_attempt(os.environ)
        assert attempt is not None
        listener = ParkListener(path_of(*attempt, os.getpid(), 1), park, bring_back)
        say("holding")
        while not options.gate.exists():
            usage.work()
            if not options.stuck:
                listener.point()
            time.sleep(0.005)
        listener.close()
    say("done")


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a test waits for it


if __name__ == "__main__":
    main()
