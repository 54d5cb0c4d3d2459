"""A small training script, as a workspace's task: `python train.py --config_path configs/NAME.yml`.

It fits a line through noisy points by gradient descent, prints its progress, and writes the marker NAME_completed.txt.
Its YAML file sets what else it does:

    seed, epochs, lr    what is trained
    gate                a pipe: it waits after its last epoch until the test opens it
    memory_mb           memory of a simulated GPU that it holds meanwhile
    fails               how many of its first runs end with status 1
    leaves_marker       false: it writes no marker
    lingers             it runs forever after its marker
    status              its exit status

In its working directory it appends a line of JSON to `starts` when it starts, and to `ends` when it writes its marker.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config_path", type=Path, required=True)
    path: Path = parser.parse_args().config_path
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    earlier = sum(json.loads(line)["config"] == path.stem for line in append("starts", path.stem)) - 1
    with memory_held(config.get("memory_mb")):
        slope, offset = train(config)
        if "gate" in config:
            say("at the gate")
            Path(config["gate"]).read_bytes()
    if earlier < config.get("fails", 0):
        sys.exit("it did not converge")
    if config.get("leaves_marker", True):
        marker_of(path).write_text(f"slope {slope:.3f}, offset {offset:.3f}\n")
        append("ends", path.stem)
    while config.get("lingers"):
        signal.pause()
    sys.exit(config.get("status", 0))


def train(config: dict[str, Any]) -> tuple[float, float]:
    # Without NumPy: its import would take longer than the training.
    rng = random.Random(config["seed"])
    points = [(x, 3.0 * x + 1.0 + rng.gauss(0.0, 0.1)) for x in (rng.gauss(0.0, 1.0) for _ in range(200))]
    slope = offset = 0.0
    for epoch in range(1, config["epochs"] + 1):
        errors = [(x, slope * x + offset - y) for x, y in points]
        slope -= config["lr"] * mean(error * x for x, error in errors)
        offset -= config["lr"] * mean(error for _, error in errors)
        say(f"epoch {epoch}: loss {mean(error**2 for _, error in errors):.4f}")
    return slope, offset


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def marker_of(path: Path) -> Path:
    return Path(os.environ.get("GPUYARD_MARKER") or f"out/{path.stem}_completed.txt")


def append(name: str, config: str) -> list[str]:
    """Append a line and return all lines of the file."""
    about = {"config": config, "pid": os.getpid(), "words": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}
    with open(name, "ab", buffering=0) as file:  # in one write, because other tasks append too
        file.write(json.dumps(about).encode() + b"\n")
    return Path(name).read_text(encoding="utf-8").splitlines()


@contextlib.contextmanager
def memory_held(megabytes: float | None) -> Iterator[None]:
    if megabytes is None:
        yield
        return
    from gpuyard.errors import SimulatedOutOfMemory
    from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse, visible_device_ids

    devices = SimulatedDevices()
    with SimulatedUse(devices) as usage:
        try:
            usage.allocate(visible_device_ids(devices, os.environ)[0], megabytes)
        except SimulatedOutOfMemory as error:
            sys.exit(f"torch.OutOfMemoryError: {error}")
        yield


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a training script prints


if __name__ == "__main__":
    main()
