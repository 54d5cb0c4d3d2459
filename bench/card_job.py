"""Loads a card as training does: holds memory, and computes between pauses. Prints a result at the end that depends on
every step, so that two runs can be compared bit by bit.

    python -P card_job.py GIGABYTES STEPS SEED [parkable]

With `parkable` it moves its GPU memory to RAM itself when it is suspended.
"""

import sys
import time

import torch

import gpuyard

_SIDE = 2048
_ROUNDS = 6
_PAUSE_S = 0.02


def main(gigabytes: float, steps: int, seed: int, *, is_parkable: bool) -> None:
    torch.manual_seed(seed)
    # GIGABYTES includes the CUDA context and the matrices.
    held = torch.randint(0, 255, (int((gigabytes - 0.6) * 2**30),), dtype=torch.uint8, device="cuda")
    state = torch.randn(_SIDE, _SIDE, device="cuda")
    weight = torch.randn(_SIDE, _SIDE, device="cuda") / _SIDE**0.5
    parking = gpuyard.torch.parkable(held, weight) if is_parkable else None
    if parking is not None:
        began = time.monotonic()
        parking.point()
        print(f"parkable after {time.monotonic() - began:.2f} s", flush=True)
    print("ready", flush=True)
    for _ in range(steps):
        if parking is not None:
            parking.point()
        for _ in range(_ROUNDS):
            state = torch.tanh(state @ weight)
        torch.cuda.synchronize()
        time.sleep(_PAUSE_S)
    bits = state.view(torch.int32).to(torch.int64).sum().item()
    kept = held[:: 1 << 12].to(torch.int64).sum().item()
    print(f"result {bits} {kept}", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), is_parkable="parkable" in sys.argv[4:])
