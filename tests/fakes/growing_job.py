"""A program whose memory on a simulated GPU grows: `python growing_job.py --vram 300 --to 2700 --then 900 GATE`.

It allocates `--vram`, grows step by step to `--to`, and stays there until the file GATE exists. Then it allocates
`--then` more, and works for a moment. The checksum that it prints covers every piece of work.
"""

import argparse
import os
import sys
import time
import zlib
from pathlib import Path

from gpuyard.errors import SimulatedOutOfMemory
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse, visible_device_ids

# By path, because it is started in another working directory; -P, because the files beside it are not modules.
COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()))
_PIECES = 20
_PIECE_S = 0.01
_STEP_MB = 100.0


def main() -> int:
    options = parse()
    devices = SimulatedDevices()
    device_id = visible_device_ids(devices, dict(os.environ))[0]
    with SimulatedUse(devices) as usage:
        try:
            grow(usage, device_id, options.vram, options.to)
            while not options.gate.exists():
                do_piece(usage)
            usage.allocate(device_id, options.then)
        except SimulatedOutOfMemory as error:
            print(f"torch.OutOfMemoryError: {error}", file=sys.stderr)  # noqa: T201 - as a program would
            return 1
        checksum = 0
        for piece in range(_PIECES):
            do_piece(usage)
            checksum = zlib.crc32(b"%d" % piece, checksum)
    print(f"{_PIECES} pieces, checksum {checksum:08x}")  # noqa: T201 - a test compares it
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--vram", "--to", "--then"):
        parser.add_argument(name, type=float, default=0.0, help="MB of a simulated GPU")
    parser.add_argument("gate", type=Path)
    return parser.parse_args()


def grow(usage: SimulatedUse, device_id: str, held_mb: float, to_mb: float) -> None:
    usage.allocate(device_id, held_mb)
    while held_mb < to_mb:
        do_piece(usage)
        more = min(_STEP_MB, to_mb - held_mb)
        usage.allocate(device_id, more)
        held_mb += more


def do_piece(usage: SimulatedUse) -> None:
    usage.work()
    time.sleep(_PIECE_S)


if __name__ == "__main__":
    sys.exit(main())
