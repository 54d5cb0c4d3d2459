"""Threads of a process whose address space is limited (`ulimit -v`).

Each thread takes 8 MB of it for its stack, and 64 MB for what it allocates. Where that is too much, a thread may end
before it has begun, and Python's `Thread.start` then waits for it for ever.

Uses the standard library alone.
"""

import resource
import signal
import threading
from types import FrameType

_STACK_BYTES = 1 << 20
_M_ARENA_MAX = -8  # of glibc's mallopt
_CHECK_EVERY_S = 5.0


def is_memory_limited() -> bool:
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def spare_address_space() -> None:
    """Where it is limited, give threads small stacks and one heap, and let no start of a thread wait for ever. Call it
    in the main thread, before other threads start."""
    if not is_memory_limited():
        return
    import ctypes  # takes some milliseconds

    threading.stack_size(_STACK_BYTES)
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # glibc's
        set_option(_M_ARENA_MAX, 1)
    watch_thread_starts(_CHECK_EVERY_S)


def watch_thread_starts(every_s: float) -> None:
    """Raise RuntimeError in the main thread from a `Thread.start` that has waited for one to two times `every_s`. It is
    that of a thread that cannot be started."""
    waiting: list[object] = [None]

    def look(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - of a signal handler
        while frame is not None and frame.f_code is not threading.Thread.start.__code__:
            frame = frame.f_back
        thread = None if frame is None else frame.f_locals["self"]
        if thread is not None and thread is waiting[0]:
            waiting[0] = None
            raise RuntimeError("can't start new thread: it ended before it had begun")
        waiting[0] = thread

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
