"""Records what the threads of gpuyard's residency do, by wrapping the methods that take time."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench import residency_render
from bench.intervals import Span
from gpuyard.recipes.render.memory.asset_copies import Copies
from gpuyard.recipes.render.memory.asset_tiers import Tiers
from gpuyard.recipes.render.write_outputs import Outputs


class SpanRecorder:
    """`spans` are in seconds of the wall clock, as a profiler's trace is. Any thread may record."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextlib.contextmanager
    def span(self, what: str) -> Iterator[None]:
        started = time.time()
        try:
            yield
        finally:
            self.spans.append(Span(threading.current_thread().name, what, started, time.time()))

    def wrap(self, owner: Any, name: str, what: str | Callable[..., str]) -> None:
        """Record every call of a method or function. `what` may be computed from the call's arguments."""
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self.span(what if isinstance(what, str) else what(*args)):
                return plain(*args, **kwargs)

        setattr(owner, name, recorded)

    def wrap_residency(self, *, is_cuda: bool) -> None:
        self.wrap(Tiers, "_wait", lambda tiers, key: f"wait for {tiers.waits.get(key, 'upload')}")
        self.wrap(Tiers, "next_unit", "plan")
        self.wrap(Tiers, "give_back", "give back")
        self.wrap(Outputs, "open", "make folder")
        self.wrap(Outputs, "commit", "sync output")
        for name in ("read", "upload", "download"):
            self.wrap(Copies, name, name)
        self.wrap(residency_render, "_on_host", "read back")
        if is_cuda:
            from gpuyard.recipes.render.memory import cuda_memory

            self.wrap(cuda_memory.CudaMemory, "page", "pin")
            self.wrap(cuda_memory._StreamLane, "finish", "finish")  # noqa: SLF001 - measured from outside
            self.wrap(cuda_memory.CudaMemory, "empty_cache", "empty cache")
