"""Decides the result of a task. Pure: the marker counts first, then how and why the program ended."""

import signal
from typing import NamedTuple

COMPLETED, FAILED, STOPPED = "completed", "failed", "stopped"
TERMINATED, HUNG_UP = 128 + signal.SIGTERM, 128 + signal.SIGHUP


class Conclusion(NamedTuple):
    """The result of a task. The runner exits with `status`, so the queue treats a task like any other job."""

    result: str
    status: int
    note: str | None = None
    writes_marker: bool = False


def conclude(status: int, *, has_marker: bool, overstayed: bool, was_stopped: bool, was_closed: bool) -> Conclusion:
    """Return the result of a program that exited with `status`.

    overstayed: it kept running after its marker, and the runner ended it.
    was_stopped: it got SIGTERM, as from `gpuyard cancel`. Exit status 0 after that does not mean completed.
    was_closed: a person closed its session.
    """
    if has_marker and overstayed:
        return Conclusion(COMPLETED, 0, "ended by gpuyard: it went on after its marker")
    if has_marker:
        return Conclusion(COMPLETED, 0, f"it ended with status {status} after its marker" if status else None)
    if was_stopped:
        return Conclusion(STOPPED, status or TERMINATED)
    if was_closed:
        return Conclusion(FAILED, status or HUNG_UP, "its session was closed")
    if status:
        return Conclusion(FAILED, status)
    return Conclusion(COMPLETED, 0, writes_marker=True)  # the marker's text says that gpuyard wrote it
