"""Makes a card small: holds all of its free memory but LEAVE_GB, until its standard input ends.

python bench/gpu_mix/hold.py LEAVE_GB
"""

import sys


def main(leave_gb: float) -> None:
    import torch

    torch.zeros(1, device="cuda")  # so that this process's own context counts as used
    free, total = torch.cuda.mem_get_info()
    held = free - int(leave_gb * 2**30)
    if held <= 0:
        raise SystemExit(
            f"{free / 2**30:.1f} GB of {total / 2**30:.1f} GB are free, which is less than {leave_gb:g} GB"
        )
    blocks = [
        torch.empty(min(2**30, held - begin), dtype=torch.uint8, device="cuda") for begin in range(0, held, 2**30)
    ]
    print(f"holding {sum(map(len, blocks)) / 2**30:.1f} GB", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(float(sys.argv[1]))
