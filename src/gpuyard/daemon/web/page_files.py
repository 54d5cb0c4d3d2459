"""The files of the web page, the two pages that need no token, and the security headers of every response.

Files are read once from the package and served from memory. Path traversal is impossible: a request has to name a known
file exactly.
"""

import hashlib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from msgspec import Struct

from gpuyard.daemon.server.http_parser import Headers, HttpError, Request, Response

INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
# The page loads only its own files, runs no inline scripts, and cannot be framed or read by other sites.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Headers = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">{head}
<link rel="icon" href="data:,"><title>gpuyard</title></head>
<body>{body}</body>
</html>
"""


class File(Struct, frozen=True):
    body: bytes
    content_type: str
    etag: str


def load_files() -> dict[str, File]:
    """Return the files by their path below the directory, without files of other types."""
    return dict(_read_files(files("gpuyard") / "ui" / "web", PurePosixPath()))


def answer_file(known: Mapping[str, File], name: str, request: Request) -> Response:
    file = known.get(name)
    if file is None:
        raise HttpError(404, f"there is no file {name[:100]}")
    # Browsers may cache a file but have to revalidate it: a daemon of another version has other files.
    headers = (("ETag", file.etag), ("Cache-Control", "no-cache"))
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status=304, content_type=file.content_type, headers=headers)
    return Response(body=file.body, content_type=file.content_type, headers=headers)


def _read_files(folder: Traversable, at: PurePosixPath) -> Iterator[tuple[str, File]]:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        name = at / entry.name
        if entry.is_dir():
            yield from _read_files(entry, name)
        elif name.suffix in _TYPES:
            body = entry.read_bytes()
            yield str(name), File(body, _TYPES[name.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


# Pages that need no token


def locked_page() -> Response:
    text = (
        "<h1>gpuyard</h1>"
        "<p>This page needs its token. Run <code>gpuyard web</code> on the machine and open the address it prints."
    )
    return _html(401, "", f"{text}</p>")


def forward_page(headers: Headers = ()) -> Response:
    """Return a page that loads `/` by itself.

    Not a redirect: after one that started at another site, browsers do not send a strict cookie.
    """
    refresh = '<meta http-equiv="refresh" content="0; url=/">'
    return _html(200, refresh, '<p><a href="/">gpuyard</a></p>', headers)


def _html(status: int, head: str, body: str, headers: Headers = ()) -> Response:
    """The connection ends: the client has no token, or will connect again."""
    text, content_type = _PAGE.format(head=head, body=body), "text/html; charset=utf-8"
    return Response(status=status, body=text.encode(), content_type=content_type, headers=headers, is_last=True)
