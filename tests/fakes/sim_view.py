"""A stand-in simulator with the options that `gpuyard datagen` passes: `python sim_view.py --mode datagen --seed 7 …`.

It takes memory and load of a simulated GPU, real RAM and real CPU time, for a while, and writes frames into its output
root. Its journal is for the test: a line per seed when a run begins, when it has allocated everything, and when it
ends.
"""

import argparse
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

FRAME = b"\x89 a frame"
_STEP_S = 0.02


def main() -> int:
    options, device = parse(), os.environ.get("CUDA_VISIBLE_DEVICES") or "-"
    journal, root = Path(options.journal), Path(options.output_root)
    note(journal, "begins", options.seed, device)
    with ExitStack() as taken:
        if options.vram or options.load:
            take(options, taken)
        held = b"\1" * (options.ram * 1048576)
        note(journal, "takes", options.seed, device)
        spend(options)
        del held
    if is_every(options.seed, options.fail_every) and fails_first(journal, options.seed):
        note(journal, "fails", options.seed, device)
        return 3
    frames = 0 if is_every(options.seed, options.empty_every) else options.max_frames
    write(root, frames)
    if not frames and options.prune_empty:
        prune(root, Path(options.prune_output_root))
    print(f"frames: {frames}")  # noqa: T201 - the summary counts them
    note(journal, "ends", options.seed, device)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--mode", choices=["datagen"], required=True)
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--prune-empty", action="store_true")
    parser.add_argument("--prune-output-root")
    parser.add_argument("--output-root", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--max-frames", type=int, default=3)
    # Options of this stand-in.
    parser.add_argument("--journal", required=True)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--gate", type=Path, help="wait until this file exists (seeds from --gated-from on)")
    parser.add_argument("--gated-from", type=int, default=0, metavar="SEED")
    parser.add_argument("--vram", type=float, default=0.0, help="MB of a simulated GPU")
    parser.add_argument("--load", type=float, default=0.0, help="percent of a simulated GPU")
    parser.add_argument("--ram", type=int, default=0, help="MB")
    parser.add_argument("--busy", action="store_true", help="keep a CPU core busy")
    parser.add_argument("--empty-every", type=int, default=0, help="multiples of this seed make no frame")
    parser.add_argument("--fail-every", type=int, default=0, help="multiples of this seed fail the first time")
    return parser.parse_args()


def take(options: argparse.Namespace, taken: ExitStack) -> None:
    from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse, visible_device_ids

    devices = SimulatedDevices()
    device_id = visible_device_ids(devices, os.environ)[0]
    usage = taken.enter_context(SimulatedUse(devices))
    usage.set_load(device_id, options.load)
    usage.allocate(device_id, options.vram)


def spend(options: argparse.Namespace) -> None:
    until, is_gated = time.monotonic() + options.seconds, options.gate and options.seed >= options.gated_from
    while time.monotonic() < until or (is_gated and not options.gate.exists()):
        if not options.busy:
            time.sleep(_STEP_S)


def is_every(seed: int, every: int) -> bool:
    return every > 0 and seed % every == 0


def fails_first(journal: Path, seed: int) -> bool:
    try:
        journal.with_name(f"failed-{seed}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def write(root: Path, frames: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for frame in range(frames):
        (root / f"frame-{frame:04d}.bin").write_bytes(FRAME)


def prune(root: Path, pruned: Path) -> None:
    pruned.mkdir(parents=True, exist_ok=True)
    root.rename(pruned / root.name)


def note(journal: Path, what: str, seed: int, device: str) -> None:
    """Append a line in one write, so that lines of several runs never mix."""
    descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{what} {seed} {time.time():.6f} {os.getpid()} {device}\n".encode())
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
