"""The response to a request whose handler raised an exception."""

import logging

from gpuyard.daemon.server.http_parser import CODE_OF, HttpError, Request, Response, error_response
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.system.passing_errors import passing_limit, remedy_of

_log = logging.getLogger(__name__)
_STATUS_OF = {code: status for status, code in CODE_OF.items()}


def failure(request: Request, error: BaseException) -> Response:
    """Return the response to a request whose handler raised `error`."""
    if isinstance(error, HttpError):
        return error_response(error.status, error.message, error.hint, error.headers)
    if isinstance(error, UserError):
        return error_response(_STATUS_OF.get(error.code, 400), error.message, error.hint, code=error.code)
    if isinstance(error, EnvironmentFault):
        return error_response(503, error.message, error.hint, code=error.code)
    limit = passing_limit(error)
    if limit is not None:
        message = f"the daemon cannot answer {request.method} {request.path} now: {limit.strerror}"
        return error_response(503, message, remedy_of(limit), code=EnvironmentFault.code)
    _log.error("%s %s failed", request.method, request.path, exc_info=error)
    message = f"the daemon failed at {request.method} {request.path}: {type(error).__name__}: {error}"
    return error_response(500, message, "this is a bug in gpuyard; see daemon.log")
