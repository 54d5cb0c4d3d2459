"""`requests` over the daemon's own socket, for tools that speak nothing else."""

import socket
from collections.abc import Iterator

import pytest
import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

from gpuyard.client import paths
from gpuyard.system import user_sockets

DAEMON = "http://gpuyard"


class _UnixConnection(HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        user_sockets.reach(paths.socket_path(), self.sock.connect)


class _UnixPool(HTTPConnectionPool):
    ConnectionCls = _UnixConnection


class _UnixAdapter(HTTPAdapter):
    def __init__(self) -> None:
        super().__init__()
        self._pool = _UnixPool("gpuyard")

    def get_connection_with_tls_context(self, *_: object, **__: object) -> HTTPConnectionPool:
        return self._pool

    def close(self) -> None:
        self._pool.close()


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with requests.Session() as made:
        made.trust_env = False
        made.mount("http://", _UnixAdapter())
        yield made
