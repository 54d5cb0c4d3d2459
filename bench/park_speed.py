"""How long it takes to park the tensors of a program in pinned memory, and what the driver does with the rest.

    python -m bench.park_speed [GIGABYTES]

Needs an idle NVIDIA card with driver 570 or later, PyTorch, and 1.2 times GIGABYTES of RAM.
"""

import subprocess
import sys
import time

from gpuyard.engines.suspend.drivers import Cuda

_PROGRAM = """
import sys, time, torch
from gpuyard.scripting.park_tensors import TensorParking
torch.manual_seed(3)
count = int(float(sys.argv[1]) * 16)
held = [torch.randint(-2**62, 2**62, (2**23,), dtype=torch.int64, device="cuda") for _ in range(count)]
parking = TensorParking([held])
cudart = torch.cuda.cudart()
for line in sys.stdin:
    began, word = time.monotonic(), line.strip()
    if word == "sum":
        answer = str(sum(each.sum().item() for each in held))
    elif word == "unregister":
        blocks = parking._memory._blocks
        answer = str([int(cudart.cudaHostUnregister(each.data_ptr())) for each in blocks])
    elif word == "register":
        blocks = parking._memory._blocks
        answer = str([int(cudart.cudaHostRegister(each.data_ptr(), len(each), 0)) for each in blocks])
    else:
        answer = str(getattr(parking, word)())
    print(f"{answer} {time.monotonic() - began:.3f}", flush=True)
"""


def main(gigabytes: float) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(gigabytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        try:
            digest = _ask(program, "sum").split()[0]
            print("reserve:", _ask(program, "reserve"))
            for words in ("park bring_back", "park driver bring_back", "park unregister driver register bring_back"):
                print(words)
                for word in words.split():
                    if word == "driver":
                        _move_rest(program.pid)
                    else:
                        print(f"  {word}: {_ask(program, word)}; {_used()}", flush=True)
                print("  result", "same" if _ask(program, "sum").split()[0] == digest else "DIFFERENT", flush=True)
        finally:
            program.kill()


def _move_rest(pid: int) -> None:
    driver = Cuda(10.0)
    driver.check(_ask_card("uuid"))
    for name in ("lock", "suspend", "restore", "unlock"):
        began = time.monotonic()
        getattr(driver, name)(pid)
        print(f"  driver, {name}: {time.monotonic() - began:.3f} s; {_used()}", flush=True)


def _ask(program: "subprocess.Popen[str]", word: str) -> str:
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(f"{word}\n")
    program.stdin.flush()
    return program.stdout.readline().strip()


def _used() -> str:
    return _ask_card("memory.used")


def _ask_card(what: str) -> str:
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main(float((*sys.argv[1:], "34")[0]))
