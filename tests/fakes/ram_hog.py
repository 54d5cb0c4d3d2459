"""A program that takes RAM page by page: `python ram_hog.py --to 600 --over 5 [GATE]`.

It touches 600 MB in steps over 5 s, says so, and holds them until the file GATE exists; without one it ends at once.
"""

import argparse
import sys
import time
from pathlib import Path

# By path, because it is started in another working directory; -P, because the files beside it are not modules.
COMMAND = (sys.executable, "-I", "-S", str(Path(__file__).resolve()))
_STEPS = 100
_POLL_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--to", type=float, required=True, help="MB of RAM")
    parser.add_argument("--over", type=float, default=5.0, help="seconds")
    parser.add_argument("gate", type=Path, nargs="?")
    options = parser.parse_args()
    held = []
    for _ in range(_STEPS):
        held.append(bytearray(int(options.to * 2**20 / _STEPS)))  # filled with zeros, so that its pages are touched
        for at in range(0, len(held[-1]), 4096):
            held[-1][at] = 1
        time.sleep(options.over / _STEPS)
    print("holding", sum(map(len, held)) >> 20, flush=True)  # noqa: T201 - a test reads it
    while options.gate is not None and not options.gate.exists():
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
