"""Decoding of requests: a mistake of the client names its key, and nothing that SQLite cannot store gets in."""

import json

import pytest

from gpuyard.daemon.api.codec import decode_body
from gpuyard.errors import UserError
from gpuyard.schema.requests import ChangeRequest, SubmissionBody

NO_JSON = [b"{", b"[]", b"\xff", b"[" * 100_000, b"null"]
REFUSED = [
    {"cwd": 1}, {"cwd": "/", "x": 1}, {"token": "\ud800"}, {"tag_sharing": {}}, {"tag_sharing": {"most_per_device": 0}},
    {"tag_sharing": {"most_per_device": 1, "stagger_s": -1}},
]  # fmt: skip


def test_bytes_that_are_not_utf_8_arrive_as_they_are_where_they_may() -> None:
    body = json.dumps({"environment": {"X": "caf\udce9"}, "command": ["run", "\udcff"]}).encode()
    found = decode_body(body, SubmissionBody, may_hold_bytes=True)
    assert (found.environment, found.command) == ({"X": "caf\udce9"}, ("run", "\udcff"))
    with pytest.raises(UserError, match="lone surrogate"):
        decode_body(b'{"ids": "\\udcff"}', ChangeRequest)


@pytest.mark.parametrize("body", [*NO_JSON, *(json.dumps(each).encode() for each in REFUSED)])
def test_a_wrong_body_is_a_user_error(body: bytes) -> None:
    with pytest.raises(UserError):
        decode_body(body, SubmissionBody, may_hold_bytes=True)
