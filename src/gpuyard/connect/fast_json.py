"""JSON as `json.dumps` and `json.loads` have it, without the import of `json`: see `fast_http`."""

import _json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def encode(value: object) -> str:
    return "".join(_encoder(value, 0))


def decode(text: str) -> "Any":
    """Decode exactly one JSON value. Raise ValueError for anything else."""
    try:
        value, end = _scanner(text, len(text) - len(text.lstrip()))
    except StopIteration:
        raise ValueError("not JSON") from None
    if text[end:].strip():
        raise ValueError("more than one value")
    return value


def _refuse(value: object) -> None:
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


class _Context:
    """Settings of the scanner: plain Python objects."""

    strict = True
    object_hook = object_pairs_hook = array_hook = None
    parse_float = parse_constant = float
    parse_int = int
    memo: "dict[str, str]" = {}


_scanner = _json.make_scanner(_Context)  # type: ignore[arg-type]
_encoder = _json.make_encoder(None, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, True)  # noqa: FBT003
