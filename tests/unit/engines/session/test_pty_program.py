"""A program on a terminal starts as soon as the system lets it."""

import errno
import os
import pty
from collections.abc import Callable
from typing import Any

import pytest

from gpuyard.engines.session import pty_program
from gpuyard.engines.session.pty_program import PtyProgram
from tests.integration.engine_fixture import wait_for


def failing_at_first(call: Callable[[], Any], number: int, times: int) -> Callable[[], Any]:
    """Return the call, preceded by failures."""
    failures = iter([number] * times)

    def fail_or_call() -> Any:
        for failure in failures:
            raise OSError(failure, os.strerror(failure))
        return call()

    return fail_or_call


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_a_process_that_the_system_refuses_is_started_later(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    monkeypatch.setattr(pty_program, "_FIRST_DELAY_S", 0.001)
    program = PtyProgram(["sh", "-c", "exit 7"], dict(os.environ))
    monkeypatch.setattr(os, "fork", failing_at_first(os.fork, number, 3))
    program.start()
    wait_for(lambda: program.status() is not None, "its end")
    assert program.status() == 7
    assert capfd.readouterr().err.count(os.strerror(number)) == 1


def test_a_refused_terminal_is_opened_later(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pty_program, "_FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(pty, "openpty", failing_at_first(pty.openpty, errno.ENOSPC, 2))
    program = PtyProgram(["true"], dict(os.environ))
    program.start()
    wait_for(lambda: program.status() is not None, "its end")
    assert program.status() == 0
    assert "no terminal can be opened" in capfd.readouterr().err


def test_an_error_that_does_not_pass_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pty, "openpty", failing_at_first(pty.openpty, errno.EACCES, 1))
    with pytest.raises(PermissionError):
        PtyProgram(["true"], dict(os.environ))
