"""The two pages that are there without the key, and what every answer says to a browser."""

from gpuyard.daemon.server.http_parser import Headers, Response

# Nothing but our own files is loaded, and nothing inside a page is run; nobody shows it inside theirs, or reads it.
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


def locked_page(status: int, headers: Headers = ()) -> Response:
    text = (
        "<h1>gpuyard</h1><p>This page is locked. Run <code>gpuyard web</code> on the machine, and open what it prints."
    )
    return _html(_PAGE.format(head="", body=f"{text}</p>"), status, headers)


def onward_page(headers: Headers = ()) -> Response:
    """Goes on to the page by itself. No redirect: after one that began at another site, a strict cookie is not sent."""
    onward = '<meta http-equiv="refresh" content="0; url=/">'
    return _html(_PAGE.format(head=onward, body='<p><a href="/">gpuyard</a></p>'), 200, headers)


def _html(text: str, status: int, headers: Headers) -> Response:
    """Whoever is shown it has not shown the key, or comes again: it need not stay connected."""
    content_type = "text/html; charset=utf-8"
    return Response(status=status, body=text.encode(), content_type=content_type, headers=headers, is_last=True)
