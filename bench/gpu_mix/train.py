"""One program of the mix. Its last line is JSON: a SHA-256 of its results, its time and its peak memory.

    python bench/gpu_mix/train.py --program NAME --seed N [--tiny]

`--tiny` is a very small size, which also runs without a GPU.
"""

import time

_STARTED = time.perf_counter()

import argparse  # noqa: E402 - the clock starts before anything is imported
import hashlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

# Instead of this folder, whose modules are not meant to be found by their short names.
sys.path[0] = str(Path(__file__).parents[2])

from bench.gpu_mix.mix import ENVIRONMENT, program  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--program", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    chosen = program(options.program)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    framework = importlib.import_module(f"bench.gpu_mix.{chosen.framework}_programs")
    loaded_s = time.perf_counter() - _STARTED
    if not options.tiny and not framework.sees_gpu():
        raise SystemExit(f"{chosen.framework} sees no GPU; --tiny runs without one")
    size = {"seed": options.seed, **(chosen.tiny if options.tiny else chosen.full)}
    results = getattr(framework, chosen.name)(size)
    digest = hashlib.sha256()
    for result in results:
        digest.update(result)
    line = {
        "program": chosen.name,
        "seed": options.seed,
        "sha256": digest.hexdigest(),
        "loading_s": round(loaded_s, 2),
        "seconds": round(time.perf_counter() - _STARTED, 2),
        "peak_mb": round(framework.peak_mb(), 1),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
