"""What a task's end amounts to. Pure: the marker comes first, then how the program ended and why."""

import signal
from typing import NamedTuple

COMPLETED, FAILED, STOPPED = "completed", "failed", "stopped"
TERMINATED, HUNG_UP = 128 + signal.SIGTERM, 128 + signal.SIGHUP


class Conclusion(NamedTuple):
    """`status` is what the queue is told, so that it does with it as with any other job's."""

    result: str
    status: int
    note: str | None = None
    writes_marker: bool = False


def conclude(status: int, *, has_marker: bool, overstayed: bool, was_stopped: bool, was_closed: bool) -> Conclusion:
    """`status` is the program's own.

    `overstayed`: it went on after its marker, and was ended for that. `was_stopped`: it was told to end, as by
    `gpuyard cancel`; a program that then ends without complaint is not done. `was_closed`: its session was, by hand.
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
    return Conclusion(COMPLETED, 0, writes_marker=True)  # the marker itself says who wrote it
