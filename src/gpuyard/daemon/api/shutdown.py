"""How the daemon ends: for good, or so that another is started in its place."""

import os

from msgspec import Struct

from gpuyard.daemon.api.parameters import read_body
from gpuyard.daemon.server.http_parser import HttpError, Request
from gpuyard.errors import UserError

# EX_TEMPFAIL of sysexits.h: not 0, so that a unit with `Restart=on-failure` is started again.
RESTART_STATUS = 75
_LONGEST_REASON = 300


class Shutdown(Struct, frozen=True, kw_only=True):
    """`status` is the exit status of a daemon that is not restarted."""

    restart: bool = False
    reason: str = "asked for"
    status: int = 0


def read_ending(request: Request) -> Shutdown:
    """Return what `POST /stop` asks for. Refused where another daemon than this one is meant."""
    body = read_body(request)
    pid, restart, reason = body.get("pid"), body.get("restart", False), body.get("reason", "asked for")
    if not (isinstance(pid, int | None) and isinstance(restart, bool) and isinstance(reason, str)):
        raise UserError("pid is a number, restart is true or false, and reason is text")
    if pid is not None and pid != os.getpid():
        raise HttpError(409, f"this daemon is process {os.getpid()}, not {pid}", hint="it was restarted meanwhile")
    return Shutdown(restart=restart, reason=reason[:_LONGEST_REASON])
