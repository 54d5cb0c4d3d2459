"""The daemon's answers as the structures of `schema`."""

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from gpuyard.connect.version_mismatch import advice
from gpuyard.errors import EnvironmentFault
from gpuyard.schema.jobs import LogEvent

T = TypeVar("T")


def convert(answer: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:  # a daemon of another version
        hint = advice(getattr(answer, "version", None))
        raise EnvironmentFault(f"the daemon's answer cannot be read: {error}", hint=hint) from error


def log_texts(events: Iterator[dict[str, Any]]) -> Iterator[str]:
    for each in events:
        event = convert(each, LogEvent)
        if event.error is not None:
            raise EnvironmentFault(event.error, hint=event.hint)
        if event.over:
            return
        if event.text is not None:
            yield event.text
    raise EnvironmentFault("the daemon ended before the job did", hint="the job keeps running: follow its log again")
