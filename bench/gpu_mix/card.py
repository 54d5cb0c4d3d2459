"""The card during a phase: its memory and utilization over time, and a process that makes it small."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

_HOLD = Path(__file__).with_name("hold.py")
_EVERY_S = 0.2
_HOLD_LIMIT_S = 120.0


class CardSample(Struct, frozen=True):
    """`at_s` is in seconds since the epoch, as the times of attempts are."""

    at_s: float
    used_mb: float
    utilization_percent: float


class CardWatch:
    """Reads card 0 by NVML every 0.2 s in a thread, until `stop`. Without NVML there are no samples."""

    def __init__(self) -> None:
        self.samples: list[CardSample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[CardSample]:
        self._over.set()
        self._thread.join()
        return self.samples

    def _watch(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
            card = pynvml.nvmlDeviceGetHandleByIndex(0)
            while not self._over.wait(_EVERY_S):
                used = pynvml.nvmlDeviceGetMemoryInfo(card).used
                load = pynvml.nvmlDeviceGetUtilizationRates(card).gpu
                self.samples.append(CardSample(time.time(), used / 2**20, float(load)))
        except pynvml.NVMLError as error:
            print(f"no samples of the card: {error}", file=sys.stderr)


@contextlib.contextmanager
def watched() -> Iterator[CardWatch]:
    watch = CardWatch()
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


@contextlib.contextmanager
def card_of(leave_gb: float | None, env: Mapping[str, str]) -> Iterator[None]:
    """Leave only `leave_gb` GB of the card free during the block; None: all."""
    if leave_gb is None:
        yield
        return
    command = [sys.executable, str(_HOLD), str(leave_gb)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        late = threading.Timer(_HOLD_LIMIT_S, holder.kill)
        late.start()
        try:
            line = holder.stdout.readline() if holder.stdout else ""
            late.cancel()
            if not line.startswith("holding"):
                raise SystemExit("the process that makes the card small did not start; its error is above")
            print(line.strip(), flush=True)
            yield
        finally:
            late.cancel()
            holder.kill()
