"""The connection of `gpuyard top` to the daemon."""

import asyncio
import contextlib
import socket
import threading

import pytest

from gpuyard.ui.tui import streams as daemon_stream
from gpuyard.ui.tui.streams import DaemonStream


def test_a_connection_that_is_made_after_its_request_was_cancelled_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, daemons = socket.socketpair()
    is_dialling, may_connect = threading.Event(), threading.Event()

    def dial(_: str) -> socket.socket:
        is_dialling.set()
        assert may_connect.wait(10)
        return ours

    async def cancel_while_dialling() -> None:
        request = asyncio.create_task(DaemonStream(lambda _: None).ask("GET", "/status"))
        await asyncio.to_thread(is_dialling.wait, 10)
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
        may_connect.set()

    monkeypatch.setattr(daemon_stream, "dial", dial)
    with daemons:
        asyncio.run(cancel_while_dialling())
        daemons.settimeout(10)
        assert daemons.recv(1) == b"", "the connection is closed, and nothing was sent"
