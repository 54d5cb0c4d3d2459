"""Find the route for a request. Templates may contain numbers, as in `/jobs/{id}/why`."""

import re
from collections.abc import Awaitable, Callable, Mapping

from msgspec import Struct

from gpuyard.daemon.server.http_parser import HttpError, Request, Response, ResponseStream

# A Struct of `gpuyard.schema`, which is encoded as JSON.
Answer = Struct
RouteAnswer = Answer | Response | ResponseStream
# Called with the request and the numbers in its path.
Route = Callable[..., RouteAnswer | Awaitable[RouteAnswer]]
Routes = Mapping[tuple[str, str], Route]

_NUMBER = r"([1-9][0-9]{0,17})"


class Router:
    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._patterns = {path: re.compile(re.sub(r"\{\w+\}", _NUMBER, path)) for _, path in routes if "{" in path}

    def find(self, request: Request) -> Callable[[], RouteAnswer | Awaitable[RouteAnswer]]:
        """Return the route, ready to be called. Raise 404 for an unknown path, 405 for a method it does not have."""
        path, numbers = self._match(request.path)
        method = "GET" if request.method == "HEAD" else request.method
        route = self._routes.get((method, path))
        if route is not None:
            return lambda: route(request, *numbers)
        known = sorted(method for method, known in self._routes if known == path)
        hint = "see /openapi.json"
        if known:
            message = f"{request.path} takes {' and '.join(known)}, not {request.method}"
            raise HttpError(405, message, hint=hint, headers=(("Allow", ", ".join(known)),))
        raise HttpError(404, f"there is no {request.method} {request.path}", hint=hint)

    def _match(self, path: str) -> tuple[str, list[int]]:
        for template, pattern in self._patterns.items():
            if (match := pattern.fullmatch(path)) is not None:
                return template, [int(number) for number in match.groups()]
        return path, []
