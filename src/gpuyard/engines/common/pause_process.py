"""Recognises podman's pause process, with the standard library alone, as the keeper does.

The first rootless podman of a user starts a process that keeps the user namespace. It inherits the environment of a job
that happened to be first, and lives until the machine is shut down: it must not count as a process of that job.
"""

_PAUSES = (b"catatonit\0-P\0", b"podman pause\0")


def is_pause_process(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read(64) in _PAUSES:
                return True
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read(32) == b"podman pause\n"
    except OSError:
        return False
