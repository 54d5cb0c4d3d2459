"""How the daemon ends: for good, or so that another daemon is started in its place."""

import os

from msgspec import Struct

from gpuyard.daemon.api.codec import decode_body
from gpuyard.daemon.server.http_parser import HttpError, Request
from gpuyard.schema.requests import StopRequest

# EX_TEMPFAIL of sysexits.h: not 0, so that a unit with `Restart=on-failure` is started again.
RESTART_STATUS = 75
_LONGEST_REASON = 300


class Shutdown(Struct, frozen=True, kw_only=True):
    """`status` is the exit status of a daemon that is not restarted."""

    restart: bool = False
    reason: str = "asked for"
    status: int = 0


def read_shutdown(request: Request) -> Shutdown:
    """Decode `POST /stop`. Refuse it if it names the pid of another daemon."""
    body = decode_body(request, StopRequest)
    if body.pid is not None and body.pid != os.getpid():
        raise HttpError(409, f"this daemon is process {os.getpid()}, not {body.pid}", hint="it was restarted meanwhile")
    return Shutdown(restart=body.restart, reason=body.reason[:_LONGEST_REASON])
