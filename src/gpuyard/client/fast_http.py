"""The HTTP client of the daemon, fast enough for a command that must finish in a few milliseconds.

- `json` and `socket` each take as long to import as the start of a bare interpreter: this module uses their C parts
(`_socket` and `_json`, unchanged since Python 3.2), writes HTTP by hand, and sends a request before `_json` is loaded.
- A request that got no answer is repeated only where that is harmless: for `GET`, or where it carries a token by which
the daemon recognises it. The repetition may meet the same daemon while it ends: that is one end, not two.
- No call waits for a daemon that is stopped: that is looked up after 10 s without a byte.
"""

import _socket
import os
import time

from gpuyard.client import paths
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.system import user_sockets
from gpuyard.version import API, __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any, Self

    # Status, content, and the daemon's version, None if it sent none.
    Answered = tuple[int, bytes, str | None]
    # Status, length of the content, None for a stream, and the header fields by their names in lower case.
    Head = tuple[int, int | None, dict[str, str]]
    OnNotice = Callable[[str], None]

# Header field of every answer: the version of the daemon.
VERSION_FIELD = "Gpuyard-Version"
# Header field of a request: a daemon older than this does nothing, and answers with the status TOO_OLD.
AT_LEAST_FIELD, TOO_OLD = "Gpuyard-At-Least", 412
_CHUNK = 256 * 1024
# After this long without a byte, see whether the daemon still works; also the limit for connecting.
_CHECK_S = 10.0
_REPEAT_FOR_S, _REPEAT_S = 30.0, 0.02
_UNQUOTED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_EVENT = b"data: "


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


class NoDaemon(EnvironmentFault):
    """No daemon listens at the socket."""


class NotThere(UserError):
    """The thing that the request is about does not exist."""

    code = "not_found"


class Closeable:
    """Is closed at the end of a `with` block."""

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class DaemonConnection(Closeable):
    """A connection to the daemon's socket, kept open between requests. Not thread-safe. `may_start`: start a daemon if
    none runs, and restart an idle one that is older than this gpuyard. `on_notice`: called with a line about a daemon
    of another version; by default it is written to standard error."""

    def __init__(self, path: str, *, may_start: bool, on_notice: "OnNotice | None" = None) -> None:
        self.path, self.may_start, self.on_notice = path, may_start, on_notice
        self.at_least = __version__ if may_start else None
        self.known_version: str | None = __version__
        self._socket: _socket.socket | None = None
        self._meanwhile: Callable[[], None] | None = None
        self._last_pid: int | None = None  # of the daemon that answered last, or ended

    def request(  # noqa: PLR0913 - a request has these parts
        self,
        method: str,
        path: str,
        query: "dict[str, str] | None" = None,
        body: object = None,
        timeout_s: "float | None" = None,
        *,
        is_repeatable: bool = False,
        meanwhile: "Callable[[], None] | None" = None,
    ) -> "Any":
        """Return the decoded answer. An error answer is raised as UserError or EnvironmentFault. `meanwhile` is called
        while the daemon works on the answer; again if the request is repeated."""
        self._meanwhile = meanwhile

        def message() -> bytes:
            fields = {AT_LEAST_FIELD: self.at_least} if self.at_least else {}
            return render_request(method, path, query, body, fields)

        may_repeat = is_repeatable or method == "GET"
        status, content, version = self._deliver(message(), timeout_s, may_repeat=may_repeat)
        if version != self.known_version:
            from gpuyard.client.restart_daemon import handle_version

            if handle_version(self, status, version):
                status, content, version = self._deliver(message(), timeout_s, may_repeat=may_repeat)
        return read_answer(status, content, version)

    def dial(self) -> None:
        if self._socket is not None:
            self._socket.settimeout(0.0)
            try:  # nothing should have arrived since the last answer; a daemon that has gone leaves an end of file
                self._socket.recv(1, _socket.MSG_PEEK)
                self.close()
            except BlockingIOError:
                return
            except OSError:
                self.close()
        self._socket = dial(self.path)

    def open(self) -> None:
        """Connect. If no daemon listens, start one, or raise NoDaemon."""
        self.dial()
        if self._socket is None:
            from gpuyard.client.queue_host import refuse_second_queue

            refuse_second_queue(os.path.dirname(self.path))
        if self._socket is None and self.may_start:
            from gpuyard.client.autostart import start_daemon

            start_daemon()
            self._socket = dial(self.path)
        if self._socket is None:
            raise NoDaemon("no daemon runs", hint="`gpuyard submit` starts one")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _deliver(self, message: bytes, timeout_s: "float | None", *, may_repeat: bool) -> "Answered":
        ended: set[int | None] = set()
        deadline = time.monotonic() + _REPEAT_FOR_S
        while True:
            try:
                return self._exchange(message, timeout_s)
            except ConnectionError as error:
                ended.add(self._last_pid)
                problem = "the daemon ended before the request was answered"
                if not may_repeat:
                    problem = "the daemon ended before it answered; it may or may not have done what was asked"
                elif len(ended) < 3 and time.monotonic() <= deadline:
                    time.sleep(_REPEAT_S)  # it may still be ending, and its socket accept connections
                    continue
                elif len(ended) > 1:
                    problem = f"{len(ended)} daemons ended, one after the other, before the request was answered"
                raise EnvironmentFault(problem, hint=f"see `gpuyard queue` and {paths.log_path()}") from error

    def _exchange(self, message: bytes, timeout_s: "float | None") -> "Answered":
        self.open()
        assert self._socket is not None
        is_kept = False
        try:
            exchange = Exchange(self._socket, timeout_s)
            exchange.send(message)
            import _json  # noqa: F401 - it decodes the answer, and is loaded while the daemon works

            if self._meanwhile is not None:
                self._meanwhile()
            answered, is_kept = exchange.receive()
        except ConnectionError:
            self._last_pid = user_sockets.peer_pid(self._socket)
            raise
        except TimeoutError as error:
            raise EnvironmentFault(
                f"the daemon did not answer within {timeout_s:g} s", hint=f"see {paths.log_path()}", code="timeout"
            ) from error
        finally:
            if not is_kept:  # also when interrupted: the next request must not read this one's answer
                self.close()
        return answered


def connect_early() -> DaemonConnection:
    """Return a connection for a request that is not ready yet; a daemon that runs accepts it meanwhile."""
    connection = DaemonConnection(paths.socket_path(), may_start=True)
    connection.dial()
    return connection


def connect(*, start: bool, on_notice: "OnNotice | None" = None) -> DaemonConnection:
    """Return an open connection. If no daemon runs, start one, or raise NoDaemon."""
    connection = DaemonConnection(paths.socket_path(), may_start=start, on_notice=on_notice)
    connection.open()
    return connection


class Exchange:
    """One request and its answer over a socket. Raises TimeoutError, or SilentDaemon if the daemon hangs."""

    def __init__(self, connection: "_socket.socket", timeout_s: "float | None") -> None:
        self._connection = connection
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._received = bytearray()
        self._silent_since: float | None = None

    def send(self, message: bytes) -> None:
        unsent = memoryview(message)
        try:
            while unsent:
                self._set_timeout()
                try:
                    unsent = unsent[self._connection.send(unsent) :]
                except TimeoutError:
                    self._check_silence()
        except (BrokenPipeError, ConnectionResetError):
            pass  # a daemon that refuses a request before its end may have answered why

    def receive_head(self) -> "Head":
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            self._receive_more()
        head = read_head(bytes(self._received[:end]))
        del self._received[: end + 4]
        return head

    def receive(self) -> "tuple[Answered, bool]":
        """Return the answer, and whether the connection may be used again."""
        status, length, fields = self.receive_head()
        if length is None:
            raise _unreadable(repr(fields).encode())
        answered = status, self.receive_content(length), fields.get(VERSION_FIELD.lower())
        return answered, fields.get("connection") != "close"

    def receive_content(self, length: int) -> bytes:
        while len(self._received) < length:
            self._receive_more()
        return bytes(self._received[:length])

    def events(self, silent_s: float) -> "Iterator[Any]":
        """Yield the decoded events of a stream until it ends. TimeoutError after `silent_s` without a byte."""
        self._deadline = None
        self._connection.settimeout(silent_s)
        while True:
            *lines, rest = self._received.split(b"\n")
            self._received = rest
            for line in lines:
                if line.startswith(_EVENT):
                    yield decode(line[len(_EVENT) :].decode())
            data = self._connection.recv(_CHUNK)
            if not data:
                return
            self._received += data

    def _receive_more(self) -> None:
        while True:
            self._set_timeout()
            try:
                data = self._connection.recv(_CHUNK)
                break
            except TimeoutError:
                self._check_silence()
        if not data:
            raise ConnectionResetError
        self._received += data
        self._silent_since = None

    def _set_timeout(self) -> None:
        left = _CHECK_S if self._deadline is None else self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(min(left, _CHECK_S))

    def _check_silence(self) -> None:
        from gpuyard.client.daemon_liveness import is_stopped, silent

        pid, now = user_sockets.peer_pid(self._connection), time.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        # A busy daemon may take long. With a deadline it was asked to delay its answer.
        if (self._deadline is None and now - self._silent_since >= 300.0) or is_stopped(pid):
            raise silent(pid)


def dial(path: str) -> "_socket.socket | None":
    """Return a connected socket, or None if no daemon listens. Raises SilentDaemon if the daemon has accepted no
    connection for 10 s: then the kernel makes further ones wait."""
    deadline = time.monotonic() + _CHECK_S
    while True:
        try:
            return user_sockets.connect(path, timeout_s=0.0)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except BlockingIOError:
            if time.monotonic() > deadline:
                from gpuyard.client.daemon_liveness import running_pid, silent

                raise silent(running_pid(paths.lock_path())) from None
            time.sleep(_REPEAT_S)
        except OSError as error:
            raise EnvironmentFault(
                f"the daemon's socket {path} cannot be reached: {error.strerror or error}",
                hint="it must be in a folder of your own; GPUYARD_HOME names another",
            ) from error


def render_request(
    method: str, path: str, query: "Mapping[str, str] | None", body: object, fields: "Mapping[str, str]"
) -> bytes:
    """Return a request as bytes; `body` is encoded as JSON, None is sent as no content."""
    target = API + _quote(path, b"/")
    if query:
        target += "?" + "&".join(f"{_quote(name)}={_quote(value)}" for name, value in query.items())
    content = b"" if body is None else encode(body).encode()
    fields = {"Host": "gpuyard", **fields, "Content-Length": str(len(content))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode() + content


def _quote(text: str, unquoted: bytes = b"") -> str:
    content = text.encode("utf-8", "surrogateescape")
    return "".join(chr(byte) if byte in _UNQUOTED or byte in unquoted else f"%{byte:02X}" for byte in content)


def read_head(head: bytes) -> "Head":
    line, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
    length = fields.get("content-length")
    try:
        return int(line.split(" ")[1]), None if length is None else int(length), fields
    except (LookupError, ValueError) as error:
        raise _unreadable(head) from error


def read_answer(status: int, content: bytes, version: "str | None" = __version__) -> "Any":
    """Return the decoded answer, or raise the error in it. An error from a daemon of another version names both."""
    try:
        answer = decode(content.decode()) if content else None
    except ValueError as error:
        raise _unreadable(content) from error
    if status < 400 and version == __version__:
        return answer
    if status < 400:
        from gpuyard.client.restart_daemon import with_missing_keys_explained

        return with_missing_keys_explained(answer, version)
    body = answer if isinstance(answer, dict) else {}
    is_users = status in (400, 401, 403, 404, 405, 409, 411, 413, 422)
    kind = NotThere if status == 404 else UserError if is_users else EnvironmentFault
    hint = body.get("hint")
    if version != __version__:
        from gpuyard.client.restart_daemon import advice

        hint = f"{hint}; {advice(version)}" if hint else advice(version)
    message = body.get("error") or f"the daemon answered with status {status}"
    raise kind(message, hint=hint, code=body.get("code"))


def _unreadable(content: bytes) -> EnvironmentFault:
    return EnvironmentFault(
        f"the daemon's answer cannot be read: {content[:60]!r}",
        hint="it may be of another version: `gpuyard daemon restart` (running jobs continue)",
    )
