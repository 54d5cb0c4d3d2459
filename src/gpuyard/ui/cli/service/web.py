"""`gpuyard web`: opens the queue's web page, and prints its address."""

from gpuyard.connect.fast_http import NoDaemon, connect
from gpuyard.errors import UserError
from gpuyard.ui.cli.terminal import note, say, say_json
from gpuyard.ui.cli.verb_options import JSON, Option, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERB = Verb(
    """Open the queue's web page, and print its address.

    The daemon serves it on this machine only, to browsers that have the token: open the whole address. Called again,
    it prints the same address. `web = true` in config.toml opens the page whenever the daemon starts.
    """,
    (
        Option(
            "address",
            "ADDRESS",
            "Listen on this address, unencrypted, so that other machines can reach it. [127.0.0.1]",
        ),
        Option("port", "PORT", "Listen on this port; 0 for any free one. [8765, or the next free one]"),
        Option("read-only", None, "Read-only: the page cannot change or submit jobs."),
        Option("new-token", None, "Make a new token; the old one stops working."),
        Option("stop", None, "Close the page."),
        JSON,
    ),
)


def run(typed: Typed) -> int:
    if typed.flag("stop"):
        return _stop(typed)
    with connect(start=True) as daemon:
        answer = daemon.request("POST", "/web", body=_body(typed), is_repeatable=not typed.flag("new-token"))
    if typed.flag("json"):
        say_json(answer)
    else:
        _show(answer)
    return 0


def _body(typed: Typed) -> "dict[str, Any]":
    body: dict[str, Any] = {}
    if typed.text("address") is not None:
        body["address"] = typed.text("address")
    if typed.text("port") is not None:
        body["port"] = _read_port(str(typed.text("port")))
    if typed.flag("read-only"):
        body["read_only"] = True
    if typed.flag("new-token"):
        body["new_token"] = True
    return body


def _read_port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= 65535):
        raise UserError(f"'{text}' is not a port", hint="give a number up to 65535, or 0 for any free port")
    return int(text)


def _stop(typed: Typed) -> int:
    try:
        with connect(start=False) as daemon:
            was_open = daemon.request("POST", "/web/stop", body={})["stopped"]
    except NoDaemon:
        was_open = False
    if typed.flag("json"):
        say_json({"stopped": was_open})
    else:
        say("the page is closed" if was_open else "no page is open")
    return 0


def _show(answer: "dict[str, Any]") -> None:
    say(answer["url"])
    for text in answer["notes"]:
        note(f"! {text}")
    if answer["read_only"]:
        note("read-only")
    if answer["address"] == "127.0.0.1":
        import os

        port = answer["port"]
        note(f"from another machine: ssh -L {port}:127.0.0.1:{port} {os.uname().nodename}, then open the same address")
