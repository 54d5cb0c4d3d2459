"""The page's own files: read once, from where the package is, and answered from memory.

There is no path to lead astray: a file is known by its whole name, or it is not there.
"""

import hashlib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from msgspec import Struct

from gpuyard.daemon.server.http_parser import HttpError, Request, Response

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


class File(Struct, frozen=True):
    body: bytes
    content_type: str
    mark: str


def load_files() -> dict[str, File]:
    """By their names below the folder. What is of no type that a page is made of is left out."""
    return dict(_found_in(files("gpuyard") / "ui" / "web", PurePosixPath()))


def answer_file(known: Mapping[str, File], name: str, request: Request) -> Response:
    file = known.get(name)
    if file is None:
        raise HttpError(404, f"there is no file {name[:100]}")
    # It may be kept, and is asked for again each time: a daemon of another version may have another.
    headers = (("ETag", file.mark), ("Cache-Control", "no-cache"))
    if file.mark in request.headers.get("if-none-match", ""):
        return Response(status=304, content_type=file.content_type, headers=headers)
    return Response(body=file.body, content_type=file.content_type, headers=headers)


def _found_in(folder: Traversable, at: PurePosixPath) -> Iterator[tuple[str, File]]:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        name = at / entry.name
        if entry.is_dir():
            yield from _found_in(entry, name)
        elif name.suffix in _TYPES:
            body = entry.read_bytes()
            yield str(name), File(body, _TYPES[name.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
