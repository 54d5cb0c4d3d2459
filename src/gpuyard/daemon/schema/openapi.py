"""The daemon's routes as an OpenAPI document, made of `operations`, for whoever writes a client in another language."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec

from gpuyard.daemon.schema.operations import JSON, OPERATIONS, Operation, Parameter
from gpuyard.daemon.schema.queue_answers import Error
from gpuyard.version import __version__

Schema = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"
_NUMBER: Schema = {"type": "integer", "minimum": 1, "maximum": 10**18 - 1}
_SAYS = (
    "HTTP and JSON on a unix socket that only its owner can use, and, once `gpuyard web` has been asked for it, on a "
    "port that takes a token. Keys and routes are only ever added. Unknown is null, never zero."
)
_ERRORS = {
    400: "A mistake of the caller's: the hint says what to send instead.",
    401: "Over the page's port: there is no token, or a wrong one.",
    403: "Over the page's port: this is not for it.",
    404: "There is no such job, or no such route.",
    405: "It is not to be asked so.",
    409: "It cannot be done as things stand.",
    413: "The body is too long.",
    429: "Too many requests.",
    503: "The machine stands in the way.",
}


@cache
def document() -> bytes:
    return msgspec.json.encode(describe(OPERATIONS.values()))


def describe(operations: Iterable[Operation]) -> Schema:
    each = tuple(operations)
    kinds = [kind for operation in each for kind in _kinds(operation)]
    schemas, components = msgspec.json.schema_components([Error, *kinds], ref_template=_REFERENCE)
    error, of_kind = schemas[0], iter(schemas[1:])
    paths: dict[str, Schema] = {}
    for operation in each:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, of_kind)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpuyard",
            "version": __version__,
            "summary": "A GPU scheduler's queue.",
            "description": _SAYS,
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {str(status): _response(says, JSON, error) for status, says in _ERRORS.items()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _kinds(operation: Operation) -> list[Any]:
    """In the order in which `_operation` takes their schemas."""
    body = [] if operation.body is None else [operation.body]
    return [*(each.kind for each in operation.query), *body, operation.answer]


def _operation(operation: Operation, schemas: Iterable[Schema]) -> Schema:
    of_kind = iter(schemas)
    parameters = [_in_path(name) for name in re.findall(r"\{(\w+)\}", operation.path)]
    parameters += [_in_query(each, next(of_kind)) for each in operation.query]
    body = {} if operation.body is None else {"requestBody": {"content": {JSON: {"schema": next(of_kind)}}}}
    answer = _response("The answer.", operation.media, next(of_kind))
    errors = {str(status): {"$ref": f"#/components/responses/{status}"} for status in _ERRORS}
    return {
        "operationId": operation.name,
        "summary": operation.says,
        "parameters": parameters,
        **body,
        "responses": {"200": answer, **errors},
    }


def _response(says: str, media: str, schema: Schema) -> Schema:
    return {"description": says, "content": {media: {"schema": schema}}}


def _in_path(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": _NUMBER}


def _in_query(parameter: Parameter, schema: Schema) -> Schema:
    told = {"name": parameter.name, "in": "query", "description": parameter.says, "schema": schema}
    return {**told, "required": True} if parameter.is_required else told
