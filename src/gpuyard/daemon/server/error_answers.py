"""The response to a request whose handler raised an exception."""

import logging

from gpuyard.daemon.server.http_parser import HttpError, Request, Response, error_response
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.system.passing_errors import passing_limit, remedy_of

_log = logging.getLogger(__name__)
# The status of a UserError with this code; others have 400.
_STATUSES = {"not_found": 404, "conflict": 409, "too_large": 413, "impossible": 422}


def failure(request: Request, error: BaseException) -> Response:
    """Return the response to a request whose handler raised `error`."""
    if isinstance(error, HttpError):
        return error_response(error.status, error.message, error.hint, error.headers)
    if isinstance(error, UserError):
        return error_response(_STATUSES.get(error.code, 400), error.message, error.hint, code=error.code)
    if isinstance(error, EnvironmentFault):
        return error_response(503, error.message, error.hint, code=error.code)
    limit = passing_limit(error)
    if limit is not None:
        message = f"the daemon cannot answer {request.method} {request.path} now: {limit.strerror}"
        return error_response(503, message, remedy_of(limit), code=EnvironmentFault.code)
    _log.error("%s %s failed", request.method, request.path, exc_info=error)
    message = f"the daemon failed at {request.method} {request.path}: {type(error).__name__}: {error}"
    return error_response(500, message, "this is a bug in gpuyard; see daemon.log")
