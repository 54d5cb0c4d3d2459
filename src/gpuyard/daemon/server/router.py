"""Find the route for a request, and the requests that a client of `/events` watches."""

import re
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import parse_qsl, unquote

from msgspec import Struct

from gpuyard.daemon.server.http_messages import HttpError, Request
from gpuyard.version import API

EVENTS = "/events"
# A method, and a path that may contain numbers, as in `/jobs/{id}/why`.
RouteKey = tuple[str, str]
# Called with the numbers in the path, then with the decoded query or body if the operation has one.
Route = Callable[..., Struct | Awaitable[Struct]]
_NUMBER = r"([1-9][0-9]{0,17})"


class Router:
    def __init__(self, routes: Iterable[RouteKey]) -> None:
        self._routes = set(routes)
        paths = {path for _, path in self._routes if "{" in path}
        self._patterns = {path: re.compile(re.sub(r"\{\w+\}", _NUMBER, path)) for path in paths}

    def find(self, request: Request) -> tuple[RouteKey, list[int]]:
        """Return the route and the numbers in the path. Raise 404 for an unknown path, 405 for another method."""
        method, path = "GET" if request.method == "HEAD" else request.method, request.path
        if (method, path) in self._routes:
            return (method, path), []
        for template, pattern in self._patterns.items():
            if (match := pattern.fullmatch(path)) is not None:
                path = template
                if (method, path) in self._routes:
                    return (method, path), [int(number) for number in match.groups()]
                break
        hint = "see /openapi.json"
        if known := sorted(method for method, known in self._routes if known == path):
            message = f"{request.path} takes {' and '.join(known)}, not {request.method}"
            raise HttpError(405, message, hint=hint, headers=(("Allow", ", ".join(known)),))
        raise HttpError(404, f"there is no {request.method} {request.path}", hint=hint)


def watched_targets(request: Request) -> list[str]:
    """Return the targets that a client of `/events` watches, such as `/status` and `/jobs?state=running`."""
    return request.query.get("watch", "").split()


def target_request(target: str) -> Request:
    """Return the GET request that a target stands for."""
    path, _, query = target.partition("?")
    if not path.startswith("/") or path == EVENTS:
        raise HttpError(400, f"'{target[:60]}' cannot be watched", hint="name routes that answer GET")
    return Request(method="GET", path=API + unquote(path), query=dict(parse_qsl(query, keep_blank_values=True)))
