"""Decodes requests into Structs of `gpuyard.schema`, makes answers of other Structs, and encodes them, with times of
the queue as times of day.
"""

import json
import math
import re
from enum import EnumType
from typing import Any, TypeVar, get_args, get_type_hints, overload

import msgspec
from msgspec import Struct

from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.errors import UserError
from gpuyard.model.machine_snapshot import iso_time

T = TypeVar("T", bound=Struct)
MOST_ROWS = 10_000
# Rows that are made before other requests are served.
ROWS_AT_ONCE = 10
# Of a page of an export.
EXPORT_PAGE = 500
# Of a list in an answer that gives the number of all.
MOST_LISTED = 100
_AT_KEY = re.compile(r" - at `\$\.(\w+).*`$")


def encode(answer: Struct) -> bytes:
    """Encode an answer as JSON. Commands and variables may hold lone surrogates, for bytes that are not UTF-8: msgspec
    rejects them, and `json` escapes them."""
    try:
        return msgspec.json.encode(answer)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(answer)).encode()


def copy_fields(kind: type[T], /, *sources: object, **others: Any) -> T:
    """Return a `kind` with these fields, and all others from the first source that has one of the same name."""
    names = [name for name in kind.__struct_fields__ if name not in others]
    same = {name: getattr(next(each for each in sources if hasattr(each, name)), name) for name in names}
    return kind(**same, **others)


def decode_body(body: bytes, kind: type[T], *, may_hold_bytes: bool = False) -> T:
    """Decode a body.

    Lone UTF-16 surrogates are rejected, which SQLite cannot store; with `may_hold_bytes`, those that stand for bytes
    that are not UTF-8 are accepted, as in variables.
    """
    try:
        content = json.loads(body or b"{}")
        if b"\\u" in body:
            json.dumps(content, ensure_ascii=False).encode(errors="surrogateescape" if may_hold_bytes else "strict")
    except UnicodeEncodeError:
        raise UserError("the request's body has a lone surrogate in it", hint="send it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"the request's body is not JSON: {error}") from error
    return decode(content, kind, "body")


def decode(content: Any, kind: type[T], what: str) -> T:
    """Decode a query or a parsed body. UserError says which key is wrong."""
    try:
        decoded = msgspec.convert(content, kind, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        key = match[1] if (match := _AT_KEY.search(text)) else None
        problem = _AT_KEY.sub("", text).replace("Invalid enum value", "cannot be")
        message = f"the request's {what}: {problem[0].lower()}{problem[1:]}" if key is None else f"{key}: {problem}"
        allowed = get_type_hints(kind).get(key or "")
        values = list(allowed) if isinstance(allowed, EnumType) else get_args(allowed)
        is_choice = values and all(isinstance(each, str) for each in values)
        raise UserError(message, hint=f"it can be {', '.join(values)}" if is_choice else "see /openapi.json") from None
    for key in kind.__struct_fields__:
        if isinstance(value := getattr(decoded, key), float) and not math.isfinite(value):
            raise UserError(f"{key}: {value} is not a finite number")
    return decoded


@overload
def wall_time(scheduler: SchedulerLoop, at: float) -> str: ...


@overload
def wall_time(scheduler: SchedulerLoop, at: float | None) -> str | None: ...


def wall_time(scheduler: SchedulerLoop, at: float | None) -> str | None:
    """Return a time of the queue as a time of day: in UTC, with milliseconds."""
    return None if at is None else iso_time(scheduler.clock.to_wall(at))
