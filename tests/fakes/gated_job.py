"""A program that holds memory of a simulated GPU and works on it: `python gated_job.py --vram 1500 GATE`.

It does half of its work, continues without counting until the file GATE exists, and does the other half. So it runs for
as long as a test wants, however slow the machine is, and the checksum that it prints covers every piece of work.
"""

import argparse
import os
import sys
import time
import zlib
from pathlib import Path

from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse, visible_device_ids

# By path, because it is started in another working directory; -P, because the files beside it are not modules.
COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()))
_PIECES = 20
_PIECE_S = 0.01


def main() -> None:
    options = parse()
    devices = SimulatedDevices()
    device_id = visible_device_ids(devices, dict(os.environ))[0]
    with SimulatedUse(devices) as usage:
        usage.set_load(device_id, options.load)
        usage.allocate(device_id, options.vram)
        print(f"{device_id}: holding", flush=True)  # noqa: T201 - a test waits for it
        checksum = work(usage, options.gate)
    print(f"{_PIECES} pieces, checksum {checksum:08x}")  # noqa: T201 - a test compares it


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--vram", type=float, required=True, help="MB of a simulated GPU")
    parser.add_argument("--load", type=float, default=0.0, help="percent of a simulated GPU")
    parser.add_argument("gate", type=Path)
    return parser.parse_args()


def work(usage: SimulatedUse, gate: Path) -> int:
    checksum = 0
    for piece in range(_PIECES):
        while piece == _PIECES // 2 and not gate.exists():
            do_piece(usage)
        do_piece(usage)
        checksum = zlib.crc32(b"%d" % piece, checksum)
    return checksum


def do_piece(usage: SimulatedUse) -> None:
    usage.work()
    time.sleep(_PIECE_S)


if __name__ == "__main__":
    main()
