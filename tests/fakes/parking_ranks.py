"""Processes that wait for each other in each step, and can park their memory of a simulated GPU, as the ranks of a
distributed training do: `python parking_ranks.py --vram 1500 GATE`.

Rank 0 is always ahead: the others are slow at the end of a step. Each prints its moves, and all end after the step in
which rank 0 finds the file GATE. These files slow rank 1 down, or end it, while they exist:

- GATE.wait: it does not come to the end of its step.
- GATE.crash: it ends there.
- GATE.unsaid: it does not answer that its memory has moved.
- GATE.full: it cannot take its memory back.

With `--unregistered` rank 1 never registers; with `--late N` it does so N steps after rank 0.
"""

import argparse
import contextlib
import os
import socket
import sys
import time
from pathlib import Path

from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse, visible_device_ids
from gpuyard.scripting.park_tensors import ParkListener
from gpuyard.system.parking_protocol import own_attempt, path_of

COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()))
CONTEXT_MB = 256.0
_NEVER = 1 << 40
_SLOW_S = 0.03


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--vram", type=float, required=True, help="MB of a simulated GPU, for each rank")
    parser.add_argument("--late", type=int, default=0)
    parser.add_argument("--unregistered", action="store_true")
    parser.add_argument("gate", type=Path)
    options = parser.parse_args()
    ends = socket.socketpair()
    child = os.fork()
    other, mine = ends if child == 0 else ends[::-1]
    other.close()
    Rank(0 if child else 1, options, mine).work()
    mine.close()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


class Rank:
    def __init__(self, rank: int, options: argparse.Namespace, peer: socket.socket) -> None:
        self.rank, self.gate, self.peer = rank, options.gate, peer
        self.devices = SimulatedDevices()
        self.device_id = visible_device_ids(self.devices, dict(os.environ))[0]
        self.usage = SimulatedUse(self.devices)
        self.memory_mb = float(options.vram)
        self.parkable_mb = self.memory_mb - CONTEXT_MB
        self.register_after = _NEVER if rank and options.unregistered else 1 + rank * options.late
        self.works_after = 1 + options.late

    def work(self) -> None:
        step, is_last, listener = 0, False, None
        with self.usage:
            self.usage.allocate(self.device_id, self.memory_mb)
            while not is_last:
                step += 1
                is_last = self.all_reduce(is_last=self.rank == 0 and self.gate.exists())
                if self.rank:
                    self.end_step_slowly()
                if step == self.register_after:
                    listener = self.register()
                elif listener is not None:
                    listener.point()
                if step == self.works_after:
                    self.say("works")
            if listener is not None:
                listener.close()
        self.say("done")

    def all_reduce(self, *, is_last: bool) -> bool:
        """Wait for the other rank. Return what rank 0 says."""
        received = b""
        with contextlib.suppress(ConnectionError):
            self.peer.send(b"1" if is_last else b"0")
            received = self.peer.recv(1)
        if not received:
            sys.exit("the other rank has ended")
        return is_last or received == b"1"

    def end_step_slowly(self) -> None:
        time.sleep(_SLOW_S)
        self.wait_while("wait")
        if self.has("crash"):
            os._exit(3)

    def register(self) -> ParkListener:
        attempt = own_attempt(os.environ)
        assert attempt is not None
        return ParkListener(path_of(*attempt, os.getpid(), 2), self.park, self.bring_back)

    def park(self) -> int:
        self.usage.allocate(self.device_id, -self.parkable_mb)
        self.say("parked")
        self.wait_while("unsaid")
        return round(self.parkable_mb * 2**20)

    def bring_back(self) -> None:
        if self.has("full"):
            raise RuntimeError("CUDA out of memory")
        self.usage.allocate(self.device_id, self.parkable_mb)
        self.say("returned")
        self.wait_while("unsaid")

    def has(self, suffix: str) -> bool:
        return self.rank == 1 and self.gate.with_suffix(f".{suffix}").exists()

    def wait_while(self, suffix: str) -> None:
        while self.has(suffix):
            time.sleep(0.005)

    def say(self, text: str) -> None:
        os.write(1, f"{self.rank} {text}\n".encode())  # in one piece: the other rank writes too


if __name__ == "__main__":
    main()
