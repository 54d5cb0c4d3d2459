"""The targets that a client of `/events` watches, such as `/status` and `/jobs?state=running`."""

from urllib.parse import parse_qsl, unquote

from gpuyard.daemon.server.http_parser import HttpError, Request
from gpuyard.version import API

EVENTS = "/events"


def watched_targets(request: Request) -> list[str]:
    return request.query.get("watch", "").split()


def target_request(target: str) -> Request:
    """Return the GET request that a target stands for."""
    path, _, query = target.partition("?")
    if not path.startswith("/") or path == EVENTS:
        raise HttpError(400, f"'{target[:60]}' cannot be watched", hint="name routes that answer GET")
    return Request(method="GET", path=API + unquote(path), query=dict(parse_qsl(query, keep_blank_values=True)))
