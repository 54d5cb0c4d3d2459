"""How long threads wait for the interpreter lock, measured from within the process."""

import threading
import time
from collections.abc import Sequence
from typing import Any, Self

_EVERY_S = 0.002


class LockProbe:
    """A thread that sleeps 2 ms at a time and measures how late it runs again: it needs the interpreter lock for that.
    An idle machine is late by about 0.06 ms."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lock-probe")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            began = time.perf_counter()
            time.sleep(_EVERY_S)
            self._late_s.append(time.perf_counter() - began - _EVERY_S)

    def figures(self) -> dict[str, float]:
        return percentiles_us(self._late_s)


class IssueTimes:
    """Wall and CPU time of the calls that queue a picture's kernels. Their difference is waiting: for the interpreter
    lock, or inside the driver."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []

    def wrap(self, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            result = plain(*arguments)
            self._taken.append((time.perf_counter() - wall, time.thread_time() - cpu))
            return result

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Return the means per picture since the last call."""
        taken, self._taken = self._taken, []
        if not taken:
            return {}
        wall_ms, cpu_ms = (1e3 * sum(times) / len(taken) for times in zip(*taken, strict=True))
        return {"wall_ms": round(wall_ms, 3), "cpu_ms": round(cpu_ms, 3), "waiting_ms": round(wall_ms - cpu_ms, 3)}


def percentiles_us(seconds: Sequence[float]) -> dict[str, float]:
    """Return the mean and some percentiles in microseconds; nothing for no values."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    places = {"median": 0.5, "90%": 0.9, "99%": 0.99}
    found = {name: round(1e6 * ordered[int(place * (len(ordered) - 1))], 1) for name, place in places.items()}
    return {"mean": round(1e6 * sum(ordered) / len(ordered), 1), **found}
