"""The event loop reports how long each of its turns took."""

import asyncio
import itertools
import time

import pytest

from gpuyard.daemon.turn_meter import MeteredLoop


def test_a_turn_lasts_until_the_loop_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    found: list[float] = []

    async def work() -> None:
        asyncio.get_running_loop().turns.listeners.append(found.append)  # type: ignore[attr-defined]
        for _ in range(5):
            next(ticks)  # a second of work in this turn
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=MeteredLoop) as runner:
        runner.run(work())
    assert found[:2] == [6.0, 1.0]
