"""The two pages that need no token, and the security headers of every response."""

from gpuyard.daemon.server.http_parser import Headers, Response

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


def locked_page(status: int, headers: Headers = ()) -> Response:
    text = (
        "<h1>gpuyard</h1>"
        "<p>This page needs its token. Run <code>gpuyard web</code> on the machine and open the address it prints."
    )
    return _html(_PAGE.format(head="", body=f"{text}</p>"), status, headers)


def forward_page(headers: Headers = ()) -> Response:
    """Return a page that loads `/` by itself.

    Not a redirect: after one that started at another site, browsers do not send a strict cookie.
    """
    refresh = '<meta http-equiv="refresh" content="0; url=/">'
    return _html(_PAGE.format(head=refresh, body='<p><a href="/">gpuyard</a></p>'), 200, headers)


def _html(text: str, status: int, headers: Headers) -> Response:
    """The connection ends: the client has no token, or will connect again."""
    content_type = "text/html; charset=utf-8"
    return Response(status=status, body=text.encode(), content_type=content_type, headers=headers, is_last=True)
