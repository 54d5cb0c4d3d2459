"""The bodies of `POST /submissions` and `POST /jobs/{id}/resubmit`, with options from the table of submit options."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from gpuyard.core.job.submission import SubmissionRequest, read_line
from gpuyard.core.job.submit_options import SUBMIT_OPTIONS, SubmitOption

_JOBS = r"\d{1,18}(-\d{1,18})?|(name|tag)=[^\s,]+|all"
_IDS = {"type": "string", "pattern": rf"^[\s,]*(({_JOBS})([\s,]+|$))*$"}
_TEXT = {"type": "string"}
# The JSON types of each kind of option. Numbers may be sent as numbers, or as a user types them.
_KINDS: dict[str, list[dict[str, Any]]] = {
    "flag": [{"type": "boolean"}],
    "whole": [{"type": "integer"}, {"type": "string", "pattern": r"^-?\d{1,9}$"}],
    "number": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": r"^\d{1,9}(\.\d+)?$"}],
    "size": [
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "string", "pattern": r"^\d{1,9}(\.\d+)?([KMGT](i?B)?)?$"},
    ],
    "time": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": r"^\d{1,9}(\.\d+)?(ms|s|m|h|d)?$"}],
    "text": [_TEXT],
    "word": [{"type": "string", "pattern": r"^[\w.:/-]{1,100}$"}],
    "texts": [_TEXT, {"type": "array", "items": _TEXT}],
    "ids": [_IDS, {"type": "array", "items": _IDS}],
}


def _describe(option: SubmitOption) -> dict[str, Any]:
    kinds = [{"enum": list(option.choices)}] if option.kind == "choice" else _KINDS[option.kind]
    return {"description": option.help_with_default, "anyOf": [*kinds, {"type": "null"}]}


_OPTIONS = Meta(
    extra_json_schema={
        "properties": {name: _describe(option) for name, option in SUBMIT_OPTIONS.items()},
        "additionalProperties": False,
    }
)


class SubmissionBody(SubmissionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    __doc__ = SubmissionRequest.__doc__

    options: Annotated[dict[str, Any], _OPTIONS] = {}


class ResubmitBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The changes: another `command`, as a list or as a shell would read it, and other options."""

    command: str | tuple[str, ...] | None = None
    options: Annotated[dict[str, Any], _OPTIONS] = {}
    token: str = ""

    @property
    def arguments(self) -> tuple[str, ...] | None:
        return (read_line(self.command.strip()) if isinstance(self.command, str) else self.command) or None
