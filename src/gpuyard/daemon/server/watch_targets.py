"""What a viewer of changes names to be watched, as the requests that it stands for."""

from urllib.parse import parse_qsl, unquote

from gpuyard.connect.fast_http import API
from gpuyard.daemon.server.http_parser import HttpError, Request

EVENTS = "/events"


def named_in(request: Request) -> list[str]:
    """The targets, such as `/status` and `/jobs?state=running`."""
    return request.query.get("watch", "").split()


def as_request(target: str) -> Request:
    path, _, query = target.partition("?")
    if not path.startswith("/") or path == EVENTS:
        raise HttpError(400, f"'{target[:60]}' cannot be watched", hint="name routes that are asked with GET")
    return Request(method="GET", path=API + unquote(path), query=dict(parse_qsl(query, keep_blank_values=True)))
