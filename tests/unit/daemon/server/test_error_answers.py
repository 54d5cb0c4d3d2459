"""What a client is answered when a request fails: limits of the system are no bugs."""

import errno
import logging
import os

import msgspec
import pytest

from gpuyard.daemon.server.http_messages import Request, failure

REQUEST = Request(method="GET", path="/v1/jobs")


@pytest.mark.parametrize(
    ("error", "number", "remedy"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), errno.EMFILE, "ulimit -n"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), errno.ENOSPC, "df -i"),
        (RuntimeError("can't start new thread"), errno.EAGAIN, "ulimit -u"),
        (MemoryError(), errno.ENOMEM, "free some memory"),
    ],
)
def test_a_limit_of_the_system_is_reported_with_its_remedy_and_not_as_a_bug(
    error: Exception, number: int, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = failure(REQUEST, error)
    body = msgspec.json.decode(answer.body)
    assert (answer.status, body["code"]) == (503, "unavailable")
    assert os.strerror(number) in body["error"]
    assert remedy in body["hint"]
    assert caplog.records == []


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("no"), OSError(errno.EBADF, "bad")])
def test_any_other_error_is_a_bug_and_logged(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    answer = failure(REQUEST, error)
    assert (answer.status, msgspec.json.decode(answer.body)["code"]) == (500, "internal")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
