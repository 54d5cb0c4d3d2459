"""The OpenAPI document of the daemon's routes, generated from `operations`."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec

from gpuyard.schema.operations import JSON, OPERATIONS, Operation
from gpuyard.schema.queue import ErrorBody
from gpuyard.version import __version__

Schema = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"
_ID: Schema = {"type": "integer", "minimum": 1, "maximum": 10**18 - 1}
_DESCRIPTION = (
    "HTTP and JSON on a unix socket that only its owner can use, and, after `gpuyard web`, on a port that requires a "
    "token. Keys and routes are only ever added. Unknown is null, never zero."
)
_ERRORS = {
    400: "The request is wrong: the hint says what to send instead.",
    401: "Over the page's port: the token is missing or wrong.",
    403: "Over the page's port: this is not allowed there.",
    404: "There is no such job or route.",
    405: "The route does not take this method.",
    409: "The present state does not allow it.",
    413: "The body is too large.",
    422: "The job can never run on this machine.",
    429: "Too many requests.",
    503: "The machine does not allow it now.",
}


@cache
def document() -> bytes:
    return msgspec.json.encode(describe(OPERATIONS.values()))


def describe(operations: Iterable[Operation]) -> Schema:
    """Return an OpenAPI document with these operations."""
    described = tuple(operations)
    queries = {operation.query.__name__: operation.query for operation in described if operation.query}
    types = [each for operation in described for each in (operation.body, operation.answer) if each]
    schemas, components = msgspec.json.schema_components(
        [ErrorBody, *types, *queries.values()], ref_template=_REFERENCE
    )
    error, *others = schemas
    next_schema = iter(others)
    paths: dict[str, Schema] = {}
    for operation in described:
        body = next(next_schema) if operation.body else None
        entry = {
            "operationId": operation.name,
            "summary": operation.summary,
            "parameters": [*_path_parameters(operation.path), *_query_parameters(operation.query, components)],
            **({"requestBody": {"content": {JSON: {"schema": body}}}} if body else {}),
            "responses": {
                "200": _response("The answer.", operation.media, next(next_schema)),
                **{str(status): {"$ref": f"#/components/responses/{status}"} for status in _ERRORS},
            },
        }
        paths.setdefault(operation.path, {})[operation.method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpuyard",
            "version": __version__,
            "summary": "The queue of a GPU scheduler.",
            "description": _DESCRIPTION,
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in components.items() if name not in queries},
            "responses": {str(status): _response(text, JSON, error) for status, text in _ERRORS.items()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _response(text: str, media: str, schema: Schema) -> Schema:
    return {"description": text, "content": {media: {"schema": schema}}}


def _path_parameters(path: str) -> list[Schema]:
    return [{"name": name, "in": "path", "required": True, "schema": _ID} for name in re.findall(r"\{(\w+)\}", path)]


def _query_parameters(query: type[msgspec.Struct] | None, components: dict[str, Schema]) -> list[Schema]:
    """One parameter per field of the Struct that the query is decoded into."""
    if query is None:
        return []
    component = components[query.__name__]
    required = component.get("required", [])
    return [
        {"name": name, "in": "query", "schema": schema, **({"required": True} if name in required else {})}
        for name, schema in component["properties"].items()
    ]
