"""The way to the daemon, for a command that has to be done in a few milliseconds.

Importing is what costs: `json` and `socket` as much as a bare interpreter's start, each. So this module goes without:
it takes their C parts (`_json`, `_socket`), which have kept their shape since Python 3.2, and writes HTTP by hand.

What may have been done is not done again: a request that got no answer is repeated only where that is harmless, which
is where it reads (`GET`), or where the caller says so because it carries a token the daemon knows it by.

The daemon sends its version with every answer. Where that is not ours, `other_version` decides what to do.
"""

import _json
import _socket
import time

from gpuyard.connect import paths
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.version import API, __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Self

    # Status, content, and the daemon's version where it said one.
    Answered = tuple[int, bytes, str | None]


# In the head of every answer: the version of the daemon.
VERSION_FIELD = "Gpuyard-Version"
# In the head of a request: an older daemon does nothing, and answers with this status.
AT_LEAST_FIELD, TOO_OLD = "Gpuyard-At-Least", 412
_USERS_MISTAKES = frozenset({400, 401, 403, 404, 405, 409, 411, 413, 422})
_CHUNK = 256 * 1024
_PLAIN_LETTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


class NoDaemon(EnvironmentFault):
    """Nobody listens at the daemon's socket."""


class NotThere(UserError):
    """What was asked about does not exist."""


class DaemonConnection:
    """A connection to the daemon, kept from one request to the next. Not for several threads at once.

    `may_start`: start a daemon where none runs, and restart one that is idle and older than this gpuyard.
    `tell`: called with a line about a daemon of another version; by default it is written to standard error.
    """

    def __init__(self, path: str, *, may_start: bool, tell: "Callable[[str], None] | None" = None) -> None:
        self.path, self.may_start, self.tell = path, may_start, tell
        self.at_least = __version__ if may_start else None
        self.known_version: str | None = __version__
        self._socket: _socket.socket | None = None

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(  # noqa: PLR0913 - a request has these parts
        self,
        method: str,
        path: str,
        query: "dict[str, str] | None" = None,
        body: object = None,
        timeout_s: "float | None" = None,
        *,
        is_repeatable: bool = False,
    ) -> "Any":
        """The answer, decoded. An error answer is raised: as the user's mistake, or as the machine's fault."""
        asked, may_repeat = (method, path, query, body), is_repeatable or method == "GET"
        status, content, version = self._deliver(_render(*asked, self.at_least), timeout_s, may_repeat=may_repeat)
        if version != self.known_version:
            from gpuyard.connect.version_mismatch import meet

            if meet(self, status, version):
                message = _render(*asked, self.at_least)
                status, content, version = self._deliver(message, timeout_s, may_repeat=may_repeat)
        return read_answer(status, content, version)

    def open(self) -> None:
        if self._socket is not None and not _rests(self._socket):
            self.close()
        if self._socket is None:
            self._socket = _dial(self.path) or self._start_and_dial()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _start_and_dial(self) -> "_socket.socket":
        if self.may_start:
            from gpuyard.connect.autostart import start_daemon

            start_daemon()
            connection = _dial(self.path)
            if connection is not None:
                return connection
        raise NoDaemon("no daemon runs", hint="`gpuyard submit` starts one")

    def _deliver(self, message: bytes, timeout_s: "float | None", *, may_repeat: bool) -> "Answered":
        try:
            return self._exchange(message, timeout_s)
        except ConnectionError as error:
            if not may_repeat:
                raise _gone("the daemon ended before it answered; whether it has done it is not known") from error
        try:
            return self._exchange(message, timeout_s)
        except ConnectionError as error:
            raise _gone("the daemon ended twice before it answered") from error

    def _exchange(self, message: bytes, timeout_s: "float | None") -> "Answered":
        self.open()
        assert self._socket is not None
        is_kept = False
        try:
            exchange = _Exchange(self._socket, timeout_s)
            exchange.send(message)
            answered, is_kept = exchange.receive()
        except TimeoutError as error:
            raise EnvironmentFault(
                f"the daemon did not answer within {timeout_s:g} s", hint=f"{paths.log_path()} may say why"
            ) from error
        finally:
            if not is_kept:  # also when interrupted: the next request must not read this one's answer
                self.close()
        return answered


def connect(*, start: bool, path: "str | None" = None, tell: "Callable[[str], None] | None" = None) -> DaemonConnection:
    """One that is open; where no daemon runs, it is started, or `NoDaemon` raised."""
    connection = DaemonConnection(path or paths.socket_path(), may_start=start, tell=tell)
    connection.open()
    return connection


class _Exchange:
    """One request and its answer, under one deadline."""

    def __init__(self, connection: "_socket.socket", timeout_s: "float | None") -> None:
        self._connection = connection
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def send(self, message: bytes) -> None:
        self._keep_time()
        try:  # noqa: SIM105 - contextlib is not for free
            self._connection.sendall(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # who does not listen to the end has perhaps said why

    def receive(self) -> "tuple[Answered, bool]":
        """The answer, and whether the connection may be used again."""
        received = bytearray()
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += self._next()
        status, length, fields = _read_head(received[:end])
        while len(received) < end + 4 + length:
            received += self._next()
        version, is_kept = fields.get(VERSION_FIELD.lower()), fields.get("connection") != "close"
        return (status, bytes(received[end + 4 :]), version), is_kept

    def _next(self) -> bytes:
        self._keep_time()
        data = self._connection.recv(_CHUNK)
        if not data:
            raise ConnectionResetError
        return data

    def _keep_time(self) -> None:
        if self._deadline is None:
            self._connection.settimeout(None)
            return
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)


def _rests(connection: "_socket.socket") -> bool:
    """Whether nothing has come since the last answer; where the daemon has gone, its end has."""
    connection.settimeout(0.0)
    try:
        connection.recv(1, _socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _dial(path: str) -> "_socket.socket | None":
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        paths.reach(path, connection.connect)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError as error:
        connection.close()
        raise EnvironmentFault(
            f"the daemon's socket {path} cannot be reached: {error.strerror or error}",
            hint="it has to be in a folder of your own; GPUYARD_HOME names another",
        ) from error
    except EnvironmentFault:
        connection.close()
        raise
    return connection


def _render(
    method: str, path: str, query: "dict[str, str] | None", body: object, at_least: "str | None" = None
) -> bytes:
    target, content = target_of(path, query), b"" if body is None else encode(body).encode()
    wanted = f"{AT_LEAST_FIELD}: {at_least}\r\n" if at_least else ""
    head = f"{method} {target} HTTP/1.1\r\nHost: gpuyard\r\n{wanted}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def target_of(path: str, query: "dict[str, str] | None" = None) -> str:
    target = API + _quote(path, b"/")
    if query:
        target += "?" + "&".join(f"{_quote(name)}={_quote(value)}" for name, value in query.items())
    return target


def _quote(text: str, also_plain: bytes = b"") -> str:
    told = text.encode("utf-8", "surrogateescape")
    return "".join(chr(byte) if byte in _PLAIN_LETTERS or byte in also_plain else f"%{byte:02X}" for byte in told)


def _read_head(head: bytearray) -> "tuple[int, int, dict[str, str]]":
    """Status, length of the content, and all fields by their names in small letters."""
    line, *fields = head.decode("latin-1").split("\r\n")
    told = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    try:
        return int(line.split(" ")[1]), int(told["content-length"]), told
    except (LookupError, ValueError) as error:
        raise _strange(head) from error


def read_answer(status: int, content: bytes, version: "str | None" = __version__) -> "Any":
    """What was answered; an error is raised. One from a daemon of another version names both versions."""
    try:
        answer = decode(content.decode()) if content else None
    except ValueError as error:
        raise _strange(content) from error
    if status < 400 and version == __version__:
        return answer
    if status < 400:
        from gpuyard.connect.version_mismatch import lacking_keys_explained

        return lacking_keys_explained(answer, version)
    said = answer if isinstance(answer, dict) else {}
    kind = NotThere if status == 404 else UserError if status in _USERS_MISTAKES else EnvironmentFault
    hint = said.get("hint")
    if version != __version__:
        from gpuyard.connect.version_mismatch import advice

        hint = f"{hint}; {advice(version)}" if hint else advice(version)
    raise kind(said.get("error") or f"the daemon answered with status {status}", hint=hint)


def _gone(message: str) -> EnvironmentFault:
    return EnvironmentFault(message, hint=f"see `gpuyard queue`; {paths.log_path()} may say why")


def _strange(told: "bytes | bytearray") -> EnvironmentFault:
    return EnvironmentFault(
        f"the daemon answered with something that cannot be read: {bytes(told[:60])!r}",
        hint="it may be of another version: `gpuyard daemon restart` (running jobs go on)",
    )


# JSON, as `json.dumps` and `json.loads` have it


def encode(value: object) -> str:
    return "".join(_encoder(value, 0))


def decode(text: str) -> "Any":
    """ValueError where it is not JSON, or not only."""
    try:
        value, end = _scanner(text, len(text) - len(text.lstrip()))
    except StopIteration:
        raise ValueError("not JSON") from None
    if text[end:].strip():
        raise ValueError("more than one value")
    return value


def _refuse(value: object) -> None:
    raise TypeError(f"{type(value).__name__} has no place in JSON")


class _Plainly:
    """How the scanner is to take things: as Python's own."""

    strict = True
    object_hook = object_pairs_hook = array_hook = None
    parse_float = parse_constant = float
    parse_int = int
    memo: "dict[str, str]" = {}


_scanner = _json.make_scanner(_Plainly)  # type: ignore[arg-type]
_encoder = _json.make_encoder(None, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, True)  # noqa: FBT003
