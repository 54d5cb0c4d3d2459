"""A pipe that a poll or select can watch for signals."""

import os
import signal


def open_signal_pipe() -> tuple[int, int]:
    """Return both ends of a non-blocking pipe to which Python writes the number of every signal that has a handler.

    Only for the main thread. A full pipe loses numbers silently.
    """
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading, writing
