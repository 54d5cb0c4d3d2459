"""JSON as `json.dumps` and `json.loads` have it, without the import of `json`: see `fast_http`.

Plain text is encoded without `_json`, too: a request is sent before that library is loaded.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def encode(value: object) -> str:
    if isinstance(value, str) and value.isascii() and value.isprintable():
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if value is None:
        return "null"
    if type(value) is int:
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join([f"{encode(name)}:{encode(each)}" for name, each in value.items()]) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(encode, value)) + "]"
    import _json

    settings = (None, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, True)
    return "".join(_json.make_encoder(*settings)(value, 0))


def decode(text: str) -> "Any":
    """Decode exactly one JSON value. Raise ValueError for anything else."""
    import _json

    scan = _json.make_scanner(_Context)  # type: ignore[arg-type]
    try:
        value, end = scan(text, len(text) - len(text.lstrip()))
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
